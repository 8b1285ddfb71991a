"""Compiled layers: how often something is compiled, what runs when nothing can be, and that numbers stay.

Most tests compile with ``aot_eager``: dynamo's guards and AOTAutograd's graphs, hooks and saved tensors without Inductor's
code generation, which takes most of the time and is tested in ``test_trainer_compiled.py`` and on the GPU.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.layers import compiled_layer
from megatrain_accelerate.layers.compiled_layer import CompiledLayers
from megatrain_accelerate.layers.proxy import warn_once
from megatrain_accelerate.layers.saved_tensors import SavedTensors, SlotPlace

pytestmark = pytest.mark.usefixtures("profiled_once")

LAYERS = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of gradients, relative to the largest: backward sums in another order than eager autograd, which rounds to the dtype."""


@pytest.fixture(autouse=True)
def dropped_engines_are_collected() -> Iterator[None]:
    """Their threads would be counted by other tests."""
    yield
    gc.collect()


def compiled(model: nn.Module, backend: Any = "aot_eager", **settings: Any) -> Engine:
    engine = attach(model, compile_layers=True, **{"bf16": False, **settings})
    engine.runtime.compiled.backend = backend
    return engine


def loss_of(model: nn.Module, batch: int = 2, length: int = 16, **inputs: Any) -> torch.Tensor:
    ids = token_batches(1, batch, length)[0]
    return model(input_ids=ids, labels=ids, **inputs).loss


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def one_pass(
    compile_layers: bool, seed: int = 11, autocast: bool = False, changes: dict[str, Any] | None = None, **settings: Any
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients, and compilations of one pass over a new tiny model."""
    model = tiny_model(**(changes or {})).train()
    engine = compiled(model, **settings) if compile_layers else attach(model, **{"bf16": False, **settings})
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = loss_of(model)
    loss.backward()
    result = loss.item(), gradients_of(model), engine.runtime.compiled.compilations
    engine.close()
    return result


@functools.cache
def reference_pass(compile_layers: bool, **settings: Any) -> tuple[float, dict[str, torch.Tensor], int]:
    """One that several tests compare with."""
    return one_pass(compile_layers, **settings)


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        difference = float((ours[name] - gradient).abs().max())
        assert difference <= TOLERANCE[gradient.dtype] * max(float(gradient.abs().max()), 1e-3), (
            f"{name} differs by {difference}"
        )


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines that say why something isn't compiled."""
    caplog.set_level(logging.WARNING, logger=compiled_layer.__name__)
    return lambda: [record.getMessage() for record in caplog.records if "runs uncompiled" in record.getMessage()]


# ---------------------------------------------------------------------- how often


@pytest.mark.parametrize(("kept", "slots", "graphs"), [(0, 2, 1), (LAYERS, 3, 1), (2, 2, 2)])
def test_all_layers_share_one_compilation_in_every_slot_and_kept_ones_another(kept: int, slots: int, graphs: int) -> None:
    model = tiny_model().train()
    engine = compiled(model, kept_layers=kept, slots=slots)
    for _ in range(2):
        loss_of(model).backward()
    assert engine.runtime.compiled.compilations == graphs


@pytest.mark.usefixtures("without_predictions")
def test_many_lengths_and_batch_sizes_take_two_compilations_of_kept_and_of_recomputed_layers() -> None:
    model = tiny_model().train()
    engine = compiled(model, kept_layers=1)
    count = []
    for batch, length in [(2, 16), (2, 24), (2, 17), (2, 9), (3, 30), (4, 25), (6, 11), (5, 16), (2, 16)]:
        loss_of(model, batch, length).backward()
        count.append(engine.runtime.compiled.compilations)
    # The first shape, then any; each for kept and for recomputed layers.
    assert count == [2, 4, 4, 4, 4, 4, 4, 4, 4]


def test_a_padding_mask_is_one_more_graph() -> None:
    model = tiny_model().train()
    engine = compiled(model)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 10:] = 0
    for inputs in ({}, {"attention_mask": mask}, {}, {"attention_mask": mask}):
        loss_of(model, **inputs).backward()
    assert engine.runtime.compiled.compilations == 2


def test_layers_that_differ_in_an_attribute_compute_with_their_own() -> None:
    def mixed() -> nn.Module:
        model = tiny_model().train()
        for layer in model.model.layers[2:]:
            layer.mlp.act_fn = nn.GELU()
        return model

    losses, gradients = [], []
    for model in (mixed(), mixed()):
        engine = compiled(model) if losses else attach(model, bf16=False)
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradients_of(model))
    assert engine.runtime.compiled.compilations == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert_close(gradients[1], gradients[0])


def test_layers_of_other_shapes_are_compiled_apart_and_not_as_dynamic_ones() -> None:
    model = tiny_model().train()
    for layer in model.model.layers[:2]:
        for name, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
            getattr(layer.mlp, name).weight = nn.Parameter(torch.randn(shape) / 8)
    engine = compiled(model)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append([isinstance(value, torch.SymInt) for value in inputs])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    engine.runtime.compiled.backend = backend
    loss_of(model).backward()
    assert len(graphs) == 2
    assert not any(flag for flags in graphs for flag in flags)


def test_kinds_beyond_the_limit_run_as_they_are(monkeypatch: pytest.MonkeyPatch, reasons: Callable[[], list[str]]) -> None:
    monkeypatch.setattr(compiled_layer, "MOST_KINDS", 1)
    model = tiny_model().train()
    model.model.layers[0].mlp.gate_proj.bias = nn.Parameter(torch.zeros(176))
    engine = compiled(model)
    loss_of(model).backward()
    assert engine.runtime.compiled.compilations == 1
    (line,) = reasons()
    assert "more than 1 kinds" in line


def test_evaluation_compiles_nothing() -> None:
    model = tiny_model().eval()
    engine = compiled(model)
    with torch.no_grad():
        loss_of(model)
        model.generate(token_batches(1, 1, 4)[0], max_new_tokens=3, do_sample=False)
    assert engine.runtime.compiled.compilations == 0


def test_auto_compiles_large_layers_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = attach(tiny_model()).runtime.layers[0]
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert CompiledLayers("auto", gpu).wants(layer) is None
    monkeypatch.setattr(compiled_layer, "SMALLEST_LAYER_PARAMETERS", layer.unit.layout.parameter_count)
    assert CompiledLayers("auto", gpu).wants(layer) is not None
    assert CompiledLayers("auto", cpu).wants(layer) is None
    assert CompiledLayers(True, cpu).wants(layer) is not None
    assert CompiledLayers(False, gpu).wants(layer) is None


def test_the_wait_is_announced_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        one_pass(True, backend=_fails)
    lines = [record.getMessage() for record in caplog.records if "compiling" in record.getMessage()]
    assert len(lines) == 1
    assert "Qwen2DecoderLayer" in lines[0]


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize(("bf16", "autocast"), [(False, False), (True, False), (True, True)])
def test_compiled_gradients_are_close_to_the_layers_own_and_complete(bf16: bool, autocast: bool) -> None:
    settings = {"bf16": bf16, "autocast": autocast} if bf16 else {"kept_layers": 0}
    ours, theirs = reference_pass(True, **settings), one_pass(False, **settings)
    assert ours[0] == pytest.approx(theirs[0], rel=TOLERANCE[torch.bfloat16 if bf16 or autocast else torch.float32])
    assert len(theirs[1]) == len(list(tiny_model().named_parameters()))
    assert_close(ours[1], theirs[1])
    assert ours[2] == 1, "autocast's cache, which recompute switches off, must not cost a graph"


@pytest.mark.usefixtures("without_predictions")
@pytest.mark.parametrize(
    ("side", "dropout"), [("left", 0.0), pytest.param("right", 0.0, marks=pytest.mark.long), ("right", 0.3)]
)
def test_padded_batches_of_many_lengths_have_the_gradients_of_the_layers_own_code(side: str, dropout: float) -> None:
    ours, theirs = tiny_model(attention_dropout=dropout).train(), tiny_model(attention_dropout=dropout).train()
    engine = compiled(ours)
    attach(theirs, bf16=False)
    for length in (16, 21, 32):
        ids = token_batches(1, 3, length, seed=length)[0]
        mask = torch.ones_like(ids)
        # On the right so little that layers don't leave it out, by another graph.
        mask[1:, slice(0, 5) if side == "left" else slice(-2, None)] = 0
        for model in (ours, theirs):
            torch.manual_seed(length)
            labels = ids.masked_fill(mask == 0, -100)
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        assert_close(gradients_of(ours), gradients_of(theirs))
    assert engine.runtime.compiled.compilations == 2


def test_keeping_compiled_layers_changes_no_bit_with_dropout() -> None:
    changes = {"attention_dropout": 0.3}
    runs = [one_pass(True, kept_layers=kept, changes=changes) for kept in (0, LAYERS)]
    assert runs[1][0] == runs[0][0]
    assert all(torch.equal(runs[1][1][name], gradient) for name, gradient in runs[0][1].items())
    eager = one_pass(False, changes=changes)
    assert eager[0] != one_pass(False, seed=12, changes=changes)[0], "dropout is at work"
    assert runs[0][0] == pytest.approx(eager[0], rel=1e-6), "the same masks as without compilation"
    assert_close(runs[0][1], eager[1])


@pytest.mark.parametrize("kept", [0, LAYERS])
def test_backward_doesnt_read_what_forward_left_in_the_slots(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []
    reference = reference_pass(True, kept_layers=kept)[1]
    pack = SavedTensors.pack
    monkeypatch.setattr(SavedTensors, "pack", lambda self, tensor: packed.append(pack(self, tensor)) or packed[-1])
    model = tiny_model().train()
    # A slot for every layer: all would still be there.
    engine = compiled(model, kept_layers=kept, slots=LAYERS)
    loss = loss_of(model)
    for slot in engine.runtime.prefetcher.slots:
        slot.buffer.fill_(0x7F)
        slot.contents = None
    loss.backward()
    assert all(torch.equal(gradient, reference[name]) for name, gradient in gradients_of(model).items())
    places = sum(isinstance(item, SlotPlace) for item in packed)
    assert places >= (7 * kept), "weights are saved as places in a slot, also by a compiled layer"


def test_an_offloaded_layer_is_compiled_though_recomputed_ones_keep_attention() -> None:
    torch.manual_seed(0)
    model = tiny_model(num_hidden_layers=LAYERS)
    for offloaded in (0, 1):
        engine = compiled(model, offloaded_layers=offloaded, kept_attention=LAYERS)
        loss_of(model)
        assert engine.runtime.compiled.compilations == offloaded
        engine.close()


def test_a_second_backward_through_compiled_layers_that_are_kept_or_recomputed_is_the_same() -> None:
    gradients = []
    for kept in (0, LAYERS):
        model = tiny_model().train()
        compiled(model, kept_layers=kept)
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append(gradients_of(model))
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())


def test_what_a_user_packs_is_not_the_graph_that_is_dropped() -> None:
    """Users' hooks on saved tensors (``save_on_cpu``) would copy activations that nobody reads."""
    model = tiny_model().train()
    compiled(model)
    loss_of(model).backward()
    seen: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        loss_of(model).backward()
    assert seen, "tensors outside the layers are packed"
    assert torch.Size([2, 16, 176]) not in seen, "the MLP's activations are not"


def test_a_dropped_model_takes_its_compiled_layers_along() -> None:
    model = tiny_model().train()
    engine = compiled(model)
    loss_of(model).backward()
    assert engine.runtime.compiled.compilations == 1
    left = [weakref.ref(engine), weakref.ref(engine.runtime.units[0]), weakref.ref(model.model.layers[0])]
    del model, engine
    gc.collect()
    assert [reference() for reference in left] == [None, None, None]


def test_no_setting_of_torch_is_left_changed() -> None:
    limit = torch._dynamo.config.recompile_limit
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = tiny_model().train()
        compiled(model, backend=_fails)
        loss_of(model)
        assert torch.is_autocast_cache_enabled()
    assert torch._dynamo.config.recompile_limit == limit != compiled_layer.RECOMPILE_LIMIT


# ---------------------------------------------------------------------- what runs when nothing can be compiled


def _fails(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    torch.rand(3)  # as a compiler does that tries kernels
    raise NotImplementedError("no such operation here\nwith a page of advice\n\n\n\nthat nobody reads")


def _fails_in_backward(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    return aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=_fails)(graph, inputs)


@pytest.mark.parametrize("backend", [_fails, _fails_in_backward])
@pytest.mark.parametrize("kept", [0, LAYERS])
def test_layers_run_as_they_are_when_the_compiler_fails(backend: Any, kept: int, reasons: Callable[[], list[str]]) -> None:
    changes = {"attention_dropout": 0.3}
    ours = one_pass(True, backend=backend, kept_layers=kept, changes=changes)
    theirs = one_pass(False, kept_layers=kept, changes=changes)
    assert ours[0] == theirs[0]
    assert all(torch.equal(ours[1][name], gradient) for name, gradient in theirs[1].items())
    assert ours[2] == 1, "it isn't tried again"
    (line,) = reasons()
    assert "Qwen2DecoderLayer runs uncompiled: NotImplementedError: no such operation here" in line
    assert "that nobody reads" not in line


def test_code_that_isnt_one_graph_runs_as_it_is(reasons: Callable[[], list[str]]) -> None:
    model = tiny_model().train()
    rows: list[int] = []
    for layer in model.model.layers:
        forward = layer.mlp.forward

        def depends_on_data(x: torch.Tensor, forward: Any = forward) -> torch.Tensor:
            if x.sum().item() < 1e9:
                rows.append(x.shape[0])
            return forward(x)

        layer.mlp.forward = depends_on_data
    engine = compiled(model)
    loss_of(model).backward()
    assert engine.runtime.compiled.compilations == 0
    assert len(reasons()) == 1
    assert len(rows) == 2 * LAYERS - 1, "forward and recompute of each, but for the call that found out, which is kept"


def test_the_users_own_error_surfaces_and_gives_nothing_up(reasons: Callable[[], list[str]]) -> None:
    model = tiny_model().train()
    for layer in model.model.layers:
        forward = layer.mlp.forward

        def checked(x: torch.Tensor, forward: Any = forward) -> torch.Tensor:
            if x.shape[1] > 20:
                raise ValueError(f"{x.shape[1]} tokens are too many")
            return forward(x)

        layer.mlp.forward = checked
    engine = compiled(model)
    for _ in range(2):
        loss_of(model).backward()
    with pytest.raises(ValueError, match="24 tokens are too many"):
        loss_of(model, length=24)
    assert not reasons()
    count = engine.runtime.compiled.compilations
    loss_of(model).backward()
    assert engine.runtime.compiled.compilations == count == 1


def test_shapes_that_dont_fit_are_reported_by_the_layers_own_code(reasons: Callable[[], list[str]]) -> None:
    model = tiny_model().train()
    engine = compiled(model)
    layer = model.model.layers[0]
    hidden, angles = torch.randn(2, 16, 64), torch.randn(2, 16, 16)
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        layer(hidden, position_embeddings=(angles, torch.randn(2, 9, 16)))
    assert type(caught.value) is RuntimeError
    layer(hidden, position_embeddings=(angles, angles))
    assert engine.runtime.compiled.compilations == 1
    assert not reasons()


def test_a_failure_of_the_device_surfaces_as_itself(reasons: Callable[[], list[str]]) -> None:
    def runs_out(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for the layer")

    model = tiny_model().train()
    compiled(model, backend=lambda graph, inputs: runs_out)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for the layer"):
        loss_of(model)
    assert not reasons(), "the layer's own code, which would have had room here, was not tried"


def test_hooks_inside_a_layer_keep_working(reasons: Callable[[], list[str]]) -> None:
    model = tiny_model().train()
    engine = compiled(model)
    loss_of(model).backward()
    assert engine.runtime.compiled.compilations == 1
    means: list[float] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: means.append(output.mean().item()))
    loss_of(model).backward()
    assert len(means) == 1, "a recompute ends when all is there that backward needs, before the hook"
    calls = len(means)
    handle.remove()
    loss_of(model).backward()
    assert len(means) == calls
    assert engine.runtime.compiled.compilations == 1
    (line,) = reasons()
    assert "hooks are registered inside it" in line


class Operations(TorchDispatchMode):
    """Counts matrix products."""

    products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return function(*args, **(kwargs or {}))


def test_a_mode_that_watches_operations_sees_all_of_them() -> None:
    seen = []
    for make in (compiled, lambda model: attach(model, bf16=False)):
        model = tiny_model().train()
        make(model)
        with Operations() as operations:
            loss_of(model).backward()
        seen.append(operations.products)
    assert seen[0] == seen[1] > 7 * LAYERS


def test_a_replaced_forward_runs_as_it_is(reasons: Callable[[], list[str]]) -> None:
    model = tiny_model().train()
    calls: list[int] = []
    for layer in model.model.layers:
        forward = layer.forward

        def counted(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            calls.append(1)
            return forward(*args, **kwargs)

        layer.forward = counted
    engine = compiled(model)
    loss_of(model).backward()
    assert len(calls) >= 2 * LAYERS
    assert engine.runtime.compiled.compilations == 0
    assert "its forward was replaced" in reasons()[0]


def test_adapters_train_compiled() -> None:
    peft = pytest.importorskip("peft")
    gradients, counts = [], []
    for make in (compiled, lambda model: attach(model, bf16=False)):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(tiny_model(), config).train()
        engine = make(model)
        ids = token_batches(1, 2, 16)[0]
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(gradients_of(model))
        counts.append(engine.runtime.compiled.compilations)
    assert_close(*gradients)
    assert len(gradients[0]) == 4 * LAYERS
    assert counts == [2, 0], "the first layer's input needs no gradient"

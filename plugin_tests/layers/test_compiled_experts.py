"""Compiled layers of experts: what transformers' hooks record inside them (router logits) is recorded, once and in order.

Most tests compile with ``aot_eager``, as in ``test_compiled_layers.py``.
"""

from __future__ import annotations

import copy
import gc
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decoder_models import LENGTH, VOCABULARY
from engine_runs import attach, train_streamed
from expert_models import (
    EXPERTS,
    HOOKS_RECORD,
    KINDS,
    ROUTER,
    error_of,
    gradients_of,
    ids_of,
    in_bf16,
    of_experts,
    one_pass,
    true_gradients,
)
from plain_torch import tiny_model, token_batches, train_bf16_with_masters, train_fp32
from torch import nn

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.layers import compiled_layer
from megatrain_accelerate.layers.compiled_layer import CompiledLayers
from megatrain_accelerate.layers.output_recorder import captures_inside, collector

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of gradients, relative to the largest: sums in another order than eager autograd's, which round to the dtype."""

pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    pytest.mark.skipif(not HOOKS_RECORD, reason="transformers records nothing by hooks"),
    # On a CPU transformers asks for torch's version by a cached function.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


@pytest.fixture(autouse=True)
def dropped_engines_are_collected() -> Iterator[None]:
    """Their threads would be counted by other tests."""
    yield
    gc.collect()


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines that say why something isn't compiled."""
    caplog.set_level(logging.WARNING, logger=compiled_layer.__name__)
    return lambda: [record.getMessage() for record in caplog.records if "runs uncompiled" in record.getMessage()]


def compiled(model: nn.Module, backend: Any = "aot_eager", **settings: Any) -> Engine:
    engine = attach(model, compile_layers=True, **settings)
    engine.runtime.compiled.backend = backend
    return engine


def assert_close_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        difference = float((ours[name].float() - gradient.float()).abs().max())
        assert difference <= tolerance * max(float(gradient.abs().max()), 1e-3), f"{name} differs by {difference}"


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in EXPERTS),
        *(pytest.param(name, torch.float32, marks=pytest.mark.long) for name in EXPERTS),
    ],
    ids=str,
)
def test_losses_router_logits_and_every_gradient_are_those_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    reference = of_experts(name, dtype) if dtype == torch.float32 else in_bf16(of_experts(name))
    theirs = one_pass(reference)
    model = of_experts(name, dtype)
    engine = compiled(model, bf16=dtype == torch.bfloat16)
    ours = one_pass(model)
    assert engine.runtime.compiled.compilations == KINDS[name], "the compiled path is taken"
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=TOLERANCE[dtype])
    assert ours.aux_loss.item() == pytest.approx(theirs.aux_loss.item(), rel=TOLERANCE[dtype])
    assert len(ours.router_logits) == len(theirs.router_logits) > 1
    for mine, other in zip(ours.router_logits, theirs.router_logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert_close_gradients(gradients_of(model), gradients_of(reference), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "settings",
    [{"kept_layers": 1, "offloaded_layers": 1}, {"micro_batch_size": 1, "kept_layers": 3}],
    ids=["each way", "in pieces"],
)
def test_placement_changes_no_bit_of_what_is_recorded_and_of_no_gradient(settings: dict[str, Any]) -> None:
    runs = []
    pieces = {"micro_batch_size": settings.get("micro_batch_size")}
    for changes in ({"kept_layers": 0, **pieces}, settings):
        model = of_experts("mixtral")
        engine = compiled(model, **changes)
        output = one_pass(model)
        remembering = sum(changes.get(key, 0) for key in ("kept_layers", "offloaded_layers"))
        assert engine.runtime.compiled.compilations == (1 if remembering in (0, 3) else 2), "of 3 layers"
        runs.append([*output.router_logits, output.aux_loss, *gradients_of(model).values()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.fixture
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> list[CompiledLayers]:
    """All engines compile with ``aot_eager``; what compiles is listed."""
    made: list[CompiledLayers] = []
    init = CompiledLayers.__init__

    def with_a_quick_backend(self: CompiledLayers, *args: Any) -> None:
        init(self, *args)
        self.backend = "aot_eager"
        made.append(self)

    monkeypatch.setattr(CompiledLayers, "__init__", with_a_quick_backend)
    return made


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (EXPERTS[0], torch.bfloat16),
        *(pytest.param(name, torch.bfloat16, marks=pytest.mark.long) for name in EXPERTS[1:]),
        *(pytest.param(name, torch.float32, marks=pytest.mark.long) for name in EXPERTS),
    ],
    ids=str,
)
def test_five_steps_leave_the_losses_and_weights_of_plain_torch(
    name: str, dtype: torch.dtype, quick_backend: list[CompiledLayers]
) -> None:
    model, batches = of_experts(name, dtype), token_batches(5, 3, LENGTH, VOCABULARY)
    torch.manual_seed(3)
    train = train_fp32 if dtype == torch.float32 else train_bf16_with_masters
    theirs = train(copy.deepcopy(model), batches)
    torch.manual_seed(3)
    ours = train_streamed(model, batches, bf16=dtype == torch.bfloat16, compile_layers=True)
    assert quick_backend[0].compilations == KINDS[name]
    for mine, other in ((ours.losses, theirs.losses), (ours.norms, theirs.norms)):
        assert mine == pytest.approx(other, rel=TOLERANCE[dtype])
    for key, master in theirs.masters.items():
        # Five steps of Adam move a weight by 5e-3 at most, and by as much where its gradient is noise.
        difference = (ours.masters[key] - master).abs()
        assert float(difference.mean()) <= 1e-2 * TOLERANCE[dtype], f"{key} differs by {difference.mean()}"
        assert float(difference.max()) <= TOLERANCE[dtype] / 4, f"{key} differs by {difference.max()}"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ on the CPU")
@pytest.mark.parametrize("name", EXPERTS)
def test_generated_kernels_are_as_near_the_truth_as_plain_torch_is(name: str) -> None:
    truth, reference, model = true_gradients(name), in_bf16(of_experts(name)), of_experts(name)
    theirs = one_pass(reference)
    engine = compiled(model, "inductor")
    ours = one_pass(model)
    assert engine.runtime.compiled.compilations == KINDS[name]
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-3)
    assert ours.aux_loss.item() == pytest.approx(theirs.aux_loss.item(), rel=1e-3)
    for part in ("", ROUTER[name]):
        assert error_of(gradients_of(model), truth, part) <= 1.5 * error_of(gradients_of(reference), truth, part)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ on the CPU")
@pytest.mark.parametrize("name", EXPERTS)
def test_generated_fp32_kernels_give_every_gradient_of_plain_torch(name: str) -> None:
    reference, model = (of_experts(name, torch.float32) for _ in range(2))
    theirs = one_pass(reference)
    engine = compiled(model, "inductor", bf16=False)
    ours = one_pass(model)
    assert engine.runtime.compiled.compilations == KINDS[name]
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    assert ours.aux_loss.item() == pytest.approx(theirs.aux_loss.item(), rel=1e-5)
    assert_close_gradients(gradients_of(model), gradients_of(reference), 2e-5)


def test_the_auxiliary_loss_moves_the_routers_of_compiled_layers() -> None:
    gradients = []
    for records in (True, False):
        model = of_experts("mixtral")
        model.config.output_router_logits = records
        compiled(model)
        one_pass(model)
        gradients.append(model.model.layers[0].mlp.gate.weight.grad.clone())
    assert not torch.equal(*gradients)


def test_attentions_that_are_asked_for_are_recorded_by_compiled_layers() -> None:
    outputs = []
    for make in (compiled, attach):
        model = tiny_model(attn_implementation="eager").train()
        engine = make(model, bf16=False)
        ids = token_batches(1)[0]
        outputs.append(model(input_ids=ids, labels=ids, output_attentions=True, output_hidden_states=True))
        outputs[-1].loss.backward()
        assert engine.runtime.compiled.compilations == (make is compiled)
    ours, theirs = outputs
    assert (len(ours.attentions), len(ours.hidden_states)) == (4, 5)
    for mine, other in zip(ours.attentions + ours.hidden_states, theirs.attentions + theirs.hidden_states, strict=True):
        torch.testing.assert_close(mine, other)


# ---------------------------------------------------------------------- how often


@pytest.mark.long
def test_one_compilation_serves_all_slots_and_lengths_of_layers_that_record() -> None:
    model = of_experts("mixtral")
    engine = compiled(model, kept_layers=1, slots=2)
    count = []
    for batch, length in [(3, 24), (3, 17), (3, 30), (4, 11), (2, 19)]:
        ids = ids_of(batch, length)
        output = model(input_ids=ids, labels=ids)
        assert [logits.shape for logits in output.router_logits] == [(batch * length, 4)] * 3
        output.loss.backward()
        count.append(engine.runtime.compiled.compilations)
    # The first shape, then any length and number of rows; each for kept and for recomputed layers.
    assert count == [2, 4, 4, 4, 4]


def test_calls_that_record_nothing_have_a_graph_of_their_own_hooks_or_no_hooks() -> None:
    model = of_experts("mixtral")
    model.config.output_router_logits = False
    engine = compiled(model)
    count = []
    for records in (False, True, False, True):
        output = one_pass(model, output_router_logits=records)
        assert (output.router_logits is not None) is records
        count.append(engine.runtime.compiled.compilations)
    # The second call installs the hooks, which stay.
    assert count == [1, 2, 2, 2]


# ---------------------------------------------------------------------- what runs when nothing can be compiled


def _fails(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    raise NotImplementedError("no such operation here")


def test_layers_that_the_compiler_fails_on_record_once(reasons: Callable[[], list[str]]) -> None:
    reference, model = in_bf16(of_experts("mixtral")), of_experts("mixtral")
    theirs = one_pass(reference)
    compiled(model, backend=_fails)
    ours = one_pass(model)
    assert all(torch.equal(*pair) for pair in zip(ours.router_logits, theirs.router_logits, strict=True))
    assert all(torch.equal(gradient, gradients_of(model)[name]) for name, gradient in gradients_of(reference).items())
    assert len(reasons()) == 1


def test_experts_in_a_loop_over_data_run_as_they_are(reasons: Callable[[], list[str]]) -> None:
    reference, model = in_bf16(of_experts("mixtral")), of_experts("mixtral")
    for either in (reference, model):
        either.set_experts_implementation("eager")
    theirs = one_pass(reference)
    compiled(model)
    ours = one_pass(model)
    assert ours.loss.item() == theirs.loss.item()
    assert all(torch.equal(*pair) for pair in zip(ours.router_logits, theirs.router_logits, strict=True))
    (line,) = reasons()
    assert "MixtralDecoderLayer runs uncompiled: " in line


def test_a_users_hook_beside_the_recorders_keeps_working(reasons: Callable[[], list[str]]) -> None:
    model = of_experts("mixtral")
    engine = compiled(model)
    shapes: list[torch.Size] = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, output: shapes.append(output[0].shape))
    output = one_pass(model)
    assert len(output.router_logits) == 3
    assert shapes == [(3 * LENGTH, 4)] * 2, "forward and recompute"
    assert engine.runtime.compiled.compilations == 1, "the layers without it are compiled"
    (line,) = reasons()
    assert "hooks are registered inside it" in line


@pytest.fixture
def recording() -> Iterator[Callable[..., None]]:
    """Sets the channels that are recorded."""
    tokens = [collector().set(None)]
    yield lambda *channels: tokens.append(collector().set({channel: [] for channel in channels}))
    for token in reversed(tokens):
        collector().reset(token)


def test_hooks_that_record_nothing_or_more_than_an_output_are_told_apart(recording: Callable[..., None]) -> None:
    model = of_experts("mixtral")
    one_pass(model)
    layer = model.model.layers[0]
    assert captures_inside(layer) == ()
    recording("router_logits")
    assert captures_inside(layer) == (("mlp.gate", "router_logits", 0),)
    recording("router_logits", "hidden_states")
    assert captures_inside(layer) == (("mlp.gate", "router_logits", 0),), "the other one is on the layer itself"
    assert captures_inside(model.model) is None, "the first one takes its input as well"
    recording("router_logits")
    layer.mlp.register_forward_pre_hook(lambda module, args: None)
    assert captures_inside(layer) is None


def test_hooks_of_others_are_not_taken_for_transformers() -> None:
    def output_capturing_hook(module: nn.Module, args: Any, output: Any) -> None: ...

    layer = nn.Sequential(nn.Linear(2, 2))
    layer[0].register_forward_hook(output_capturing_hook)
    assert captures_inside(layer) is None


def test_a_layer_that_raises_where_torch_compile_is_switched_off_leaves_the_recording_alone() -> None:
    model = of_experts("mixtral")
    compiled(model)
    one_pass(model)

    def raises(*_: Any) -> None:
        assert collector().get() is not None
        raise ValueError("after the router")

    model.model.layers[2].mlp.experts.forward = raises
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match="after the router"):
        one_pass(model)
    assert collector().get() is None

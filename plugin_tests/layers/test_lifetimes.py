"""What must not outlive its use, and what must not survive a change: memory, threads, clip factors, stale gradients."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import attach, masters_of
from forked_process import run_forked
from layer_uses import leases_ended
from plain_torch import tiny_model, token_batches
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from megatrain_accelerate.engine import Engine, all_engines
from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

pytestmark = pytest.mark.usefixtures("profiled_once")


def prepared(
    schedule: str = "deferred", micro_batch_size: int | None = None, **changes: object
) -> tuple[nn.Module, Engine, torch.optim.AdamW]:
    model = tiny_model(**changes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model, bf16=False, micro_batch_size=micro_batch_size)
    adopt_optimizer(optimizer, engine.runtime, schedule)
    return model, engine, optimizer


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def workers() -> int:
    return sum(thread.name == "megatrain-step-worker" for thread in threading.enumerate())


def test_a_dropped_model_takes_its_store_and_its_thread_along() -> None:
    gc.collect()  # what earlier tests left in cycles would go in the middle
    before = workers()
    model, engine, optimizer = prepared()
    loss_of(model, token_batches(1)[0]).backward()
    optimizer.step()
    store = weakref.ref(engine.runtime.units[0])
    assert workers() == before + 1
    del model, engine, optimizer
    gc.collect()
    assert store() is None
    assert workers() == before


def test_a_closed_engine_leaves_plain_weights_in_full_precision() -> None:
    model = tiny_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = attach(model, bf16=True)
    engine.close()
    assert engine not in all_engines()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.detach(), before[name]), name


def test_a_closed_engine_brings_buffers_back_unless_another_model_has_their_module() -> None:
    model, other = tiny_model(), tiny_model()
    other.model.rotary_emb = model.model.rotary_emb
    engines = [attach(model), attach(other)]
    with FakeTensorMode():
        on_device = torch.ones(3, device="cuda:0")  # stands for a buffer that adoption has moved
    places = (model.model.rotary_emb._buffers, model.lm_head._buffers, model.model._buffers)
    for buffers in places:
        buffers["moved"] = on_device
    for engine, expected in zip(engines, ["cuda", "cpu"], strict=True):
        engine.close()
        assert [buffers["moved"].device.type for buffers in places] == [expected, "cpu", "cpu"]
        assert places[1]["moved"] is places[2]["moved"], "one tensor stays one"


def test_the_device_memory_of_a_closed_engine_goes_though_its_optimizer_lives() -> None:
    model, engine, optimizer = prepared(micro_batch_size=1)
    loss_of(model, token_batches(1)[0]).backward()
    optimizer.step()
    slots = [weakref.ref(slot) for slot in engine.runtime.prefetcher.slots]
    sums = weakref.ref(engine.runtime.piece_sums.buffer)
    weights = [weakref.ref(weight) for group in engine.runtime.groups for weight in group._device_weights]
    states = [weakref.ref(state) for unit in engine.runtime.units for state in unit.states]
    engine.close()
    del engine
    gc.collect()
    assert optimizer.state
    assert not any(found() is not None for found in (*slots, *states, *weights, sums))


def test_layer_inputs_die_with_backward_not_with_the_loss() -> None:
    model, engine, _ = prepared()
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    hook = lambda module, args: inputs.append(weakref.ref(args[0].untyped_storage()))  # noqa: E731
    model.model.layers[1].register_forward_pre_hook(hook)
    loss = loss_of(model, token_batches(1)[0])
    assert inputs[-1]() is not None
    loss.backward()
    assert inputs[-1]() is None
    assert loss.isfinite()
    engine.close()


def test_a_frozen_layer_between_trained_ones_gives_its_slot_back_in_its_turn() -> None:
    assert leases_ended("cpu") == [3, 2, 1, 0]


class Fails(torch.autograd.Function):
    """In backward alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


def test_a_backward_that_fails_fetches_no_more_layers() -> None:
    model, engine, _ = prepared(num_hidden_layers=6)
    (ids,) = token_batches(1)
    model(input_ids=ids, labels=ids).loss.backward()  # from now on layers are expected
    prefetcher, fetched = engine.runtime.prefetcher, list[str]()
    fill = prefetcher.fill
    prefetcher.fill = lambda slot, layer, *args: fetched.append(layer.name) or fill(slot, layer, *args)  # type: ignore
    attention = model.model.layers[3].self_attn
    attention.register_forward_hook(lambda module, args, output: (Fails.apply(output[0]), *output[1:]))
    loss = model(input_ids=ids, labels=ids).loss
    fetched.clear()
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert fetched == ["model.layers.3", "model.layers.2"]
    engine.close()


@pytest.mark.parametrize("kept", [0, 2, 4])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_whole_model_recomputes_it_as_it_ran(kept: int, use_reentrant: bool) -> None:
    gradients = []
    for checkpoints in (False, True):
        model = tiny_model(num_hidden_layers=4).train()
        engine = attach(model, bf16=False, kept_layers=kept)
        for ids in token_batches(2):

            def loss_of(embedded: torch.Tensor, ids: torch.Tensor = ids) -> torch.Tensor:
                return model(inputs_embeds=embedded, labels=ids).loss  # noqa: B023

            embedded = model.get_input_embeddings()(ids)
            loss = checkpoint(loss_of, embedded, use_reentrant=use_reentrant) if checkpoints else loss_of(embedded)
            loss.backward()
        engine.runtime.settle()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        engine.close()
    assert all(map(torch.equal, *gradients))


def test_weights_loaded_after_prepare_train_from_there() -> None:
    model, engine, optimizer = prepared()
    other = {name: tensor + 0.5 for name, tensor in tiny_model(seed=1).state_dict().items()}
    model.load_state_dict(other)
    loss_of(model, token_batches(1)[0]).backward()
    optimizer.step()
    engine.drain()
    for name, master in masters_of(engine, model).items():
        moved = (master - other[name]).abs().max()
        # AdamW's first step moves each weight by at most lr = 1e-3, and decay by 1e-5 of it.
        assert 0 < moved < 1.1e-3, name
    engine.close()


def test_a_dropped_batch_leaves_no_gradient_and_no_clip_factor_behind() -> None:
    model, engine, optimizer = prepared()
    clean, clean_engine, clean_optimizer = prepared()
    dropped, used = token_batches(2)
    for _ in range(8):
        loss_of(model, dropped).backward()
        engine.runtime.clip_grad_norm(model.parameters(), 1e-2)
        optimizer.zero_grad()
    norms = []
    for m, e, o in ((model, engine, optimizer), (clean, clean_engine, clean_optimizer)):
        loss_of(m, used).backward()
        norms.append(float(e.runtime.clip_grad_norm(m.parameters(), 1.0)))
        o.step()
        e.drain()
    assert norms[0] == norms[1]
    for a, b in zip(model.parameters(), clean.parameters(), strict=True):
        assert torch.equal(a, b)
    engine.close()
    clean_engine.close()


def test_a_backward_whose_forward_is_over_adds_to_scaled_gradients() -> None:
    plain = tiny_model()
    model = copy.deepcopy(plain)
    engine = attach(model, bf16=False)
    for trained in (plain, model):
        # Both forwards come first: at a forward between them the clipping would be carried out.
        first, second = (loss_of(trained, ids) for ids in token_batches(2))
        first.backward()
        if trained is plain:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
        else:
            engine.runtime.clip_grad_norm(model.parameters(), 1e-2)
        second.backward()
    engine.drain()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    engine.close()


def test_two_optimizers_on_one_model_are_both_clipped() -> None:
    ids = token_batches(1)[0]
    results = []
    for count in (1, 2):
        model = tiny_model()
        parameters = list(model.parameters())
        engine = attach(model, bf16=False)
        groups = [parameters] if count == 1 else [parameters[::2], parameters[1::2]]
        optimizers = [torch.optim.AdamW(group, lr=1e-3, eps=1.0) for group in groups]
        for optimizer in optimizers:
            adopt_optimizer(optimizer, engine.runtime, "deferred")
        loss_of(model, ids).backward()
        engine.runtime.clip_grad_norm(model.parameters(), 1e-2)
        for optimizer in optimizers:
            optimizer.step()
        engine.drain()
        results.append([parameter.detach().clone() for parameter in parameters])
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_backward_before_the_step_is_an_error_where_steps_run_in_backward() -> None:
    model, engine, _ = prepared("backward")
    first, second = token_batches(2)
    loss_of(model, first).backward()
    with pytest.raises(StateError, match="another one came before"):
        loss_of(model, second).backward()
    engine.close()


def test_freezing_after_prepare_stops_the_gradient_and_unfreezing_is_an_error() -> None:
    model, engine, _ = prepared()
    frozen = model.model.layers[0].mlp.up_proj.weight
    frozen.requires_grad_(False)
    loss_of(model, token_batches(1)[0]).backward()
    assert frozen.grad is None
    assert model.model.layers[0].mlp.down_proj.weight.grad is not None
    engine.close()
    model = tiny_model()
    late = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    engine = attach(model)
    late.requires_grad_(True)
    with pytest.raises(StateError, match="unfrozen"):
        loss_of(model, token_batches(1)[0])
    engine.close()


def test_a_step_between_forward_and_backward_is_an_error() -> None:
    model, engine, optimizer = prepared()
    first, second = token_batches(2)
    loss, late = loss_of(model, first), loss_of(model, second)
    loss.backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"layer .* changed between forward and backward"):
        late.backward()
    engine.close()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_double_backward_is_an_error() -> None:
    model, engine, _ = prepared()
    embedded = model.get_input_embeddings()(token_batches(1)[0]).detach().requires_grad_()
    loss = model(inputs_embeds=embedded).logits.square().mean()

    def differentiate_twice() -> None:
        loss.backward(create_graph=True)
        embedded.grad.square().sum().backward()

    with pytest.raises(RuntimeError, match="create_graph=True"):
        differentiate_twice()
    embedded.grad = None
    engine.close()


@pytest.mark.parametrize("failing", ["prefetch", "fill"])
def test_an_interrupt_while_fetching_leaves_the_slots_usable(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, _ = prepared()
    ids = token_batches(1)[0]
    expected = loss_of(model, ids).item()
    prefetcher = engine.runtime.prefetcher
    engine.runtime.layers[0].unit.version += 1  # fetched again
    if failing == "prefetch":
        target, name = prefetcher, "prefetch"
    else:
        target, name = engine.runtime.streams.h2d_stream, "wait_event"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, ids)
    assert loss_of(model, ids).item() == expected
    engine.close()


def test_inference_mode_before_training_does_no_harm() -> None:
    model, engine, _ = prepared()
    ids = token_batches(1)[0]
    with torch.inference_mode():
        loss_of(model, ids)
    loss_of(model, ids).backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    engine.close()


def test_a_copy_sees_the_steps_that_were_taken() -> None:
    model, engine, optimizer = prepared()
    loss_of(model, token_batches(1)[0]).backward()
    optimizer.step()
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    engine.drain()
    for twin in (copied, pickled):
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)
    engine.close()


def test_a_gradient_hook_on_a_streamed_parameter_is_refused() -> None:
    model, engine, _ = prepared()
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UnsupportedError, match="gradient hook"):
        loss_of(model, token_batches(1)[0]).backward()
    engine.close()


def test_a_process_that_ends_with_steps_pending_ends_well_and_applies_them(tmp_path: Path) -> None:
    program = """
import time
import torch
from plain_torch import tiny_model, token_batches
from engine_runs import attach
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
model = tiny_model(hidden_size=256, intermediate_size=1024)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine = attach(model)
adopt_optimizer(optimizer, engine.runtime, "deferred")
ids = token_batches(1)[0]
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
def last():
    time.sleep(0.5)  # longer than an interpreter takes that waits for nobody
    print("applied", float(torch.ones(1000, 1000).sum()), flush=True)
engine.runtime.worker.submit("last", last)
"""
    (tmp_path / "program.py").write_text(program)
    assert "applied" in run_forked(tmp_path / "program.py")

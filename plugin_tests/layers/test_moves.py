"""Units that move, and plans that change, when something is open, fails half-way, or looks the same without being it."""

from __future__ import annotations

import dataclasses
import gc
import threading

import pytest
import torch
from engine_runs import Training, assert_equal_states, attach, place
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.optim.host_step import TAKEN_OVER
from megatrain_accelerate.plan import device_plan
from megatrain_accelerate.store import unit as host_store

pytestmark = pytest.mark.usefixtures("profiled_once")


def training(model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **settings: object) -> Training:
    model = tiny_model().train() if model is None else model
    engine = attach(model, **settings)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))


class Shifted(nn.Module):
    """A layer whose parameter has the hidden states' shape: its gradient is the very gradient of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 8, 16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.shift


class ShiftedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Shifted() for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().sum()


@pytest.mark.parametrize("on_device", [0, 3])
def test_a_gradient_that_is_also_that_of_the_hidden_states_is_not_added_to_twice(on_device: int) -> None:
    torch.manual_seed(0)
    plain = ShiftedModel()
    model = ShiftedModel()
    model.load_state_dict(plain.state_dict())
    engine = attach(model, bf16=False, device_layers=on_device)
    last = False
    engine.runtime.offloader.is_last_backward = lambda: last
    for step in range(2):
        last = step == 1
        ids = torch.randint(0, 32, (1, 8), generator=torch.Generator().manual_seed(step))
        plain(ids).backward()
        model(ids).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5])
def test_a_move_that_finds_no_room_leaves_every_unit_whole_and_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    run, still = training(), training()
    batches = token_batches(4)
    for training_run in (run, still):
        training_run.step(batches[0])
    plan = run.engine.device_plan
    target = dataclasses.replace(plan.current.placement, on_device=frozenset({0, 1, 2}), groups_on_device=True)
    made = []
    original = host_store.DeviceMemory.__init__

    def fails_once(self: host_store.DeviceMemory, size_bytes: int, device: torch.device) -> None:
        made.append(size_bytes)
        if len(made) == failing:
            raise torch.OutOfMemoryError("no room")
        original(self, size_bytes, device)

    monkeypatch.setattr(host_store.DeviceMemory, "__init__", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        place(plan, target)
    run.step(batches[1])
    place(plan, target)
    assert [layer.unit.is_on_device for layer in run.engine.runtime.layers] == [True, True, True, False]
    run.step(batches[2])
    place(plan, Placement())
    for ids in batches[1:3]:
        still.step(ids)
    assert_equal_states(run.state(), still.state())


def test_a_second_graph_stays_open_after_the_backward_of_the_first() -> None:
    run = training()
    first, second = (run.model(input_ids=ids, labels=ids).loss for ids in token_batches(2))
    assert run.engine.runtime.open_forwards == 2
    first.backward()
    assert run.engine.runtime.open_forwards == 1
    second.backward()
    assert run.engine.runtime.open_forwards == 0


def test_a_forward_that_nobody_differentiates_is_not_waited_for() -> None:
    run = training(gpu_memory_gib=1.0, kept_layers=2)
    ids = token_batches(1)[0]
    run.step(ids)
    loss = run.model(input_ids=ids, labels=ids).loss
    del loss
    gc.collect()
    assert run.engine.runtime.open_forwards == 0
    run.step(ids)
    assert run.engine.device_plan.record["forwards_at_once"] == 1
    assert run.engine.runtime.calls.policy.kept == {2, 3}


def test_the_loss_of_the_last_step_in_a_variable_does_not_count_as_open() -> None:
    run = training(gpu_memory_gib=1.0, kept_layers=2)
    for ids in token_batches(3):
        loss = run.model(input_ids=ids, labels=ids).loss
        assert run.engine.runtime.calls.policy.kept == {2, 3}
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.engine.device_plan.record["forwards_at_once"] == 1


def test_a_failed_backward_does_not_count_as_open() -> None:
    run = training(gpu_memory_gib=1.0, kept_layers=2)
    ids = token_batches(1)[0]
    run.step(ids)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    handle = run.model.model.layers[1].register_full_backward_pre_hook(fails)
    with pytest.raises(torch.OutOfMemoryError):
        run.step(ids)
    handle.remove()
    run.optimizer.zero_grad()
    gc.collect()
    assert run.engine.runtime.open_forwards == 0


def test_what_moves_in_inference_mode_can_be_trained_afterwards() -> None:
    run = training(device_layers=-1)
    batches = token_batches(2)
    run.step(batches[0])
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    with torch.inference_mode():
        run.engine.runtime.place((), groups_on_device=False)
    run.model.load_state_dict(weights)
    run.step(batches[1])
    run.engine.drain()
    assert not any(parameter.is_inference() for parameter in run.model.parameters())


def test_weights_that_are_written_back_are_taken_over_alike_wherever_they_live() -> None:
    """A master becomes what was written, of the weight's precision, also if that is the weight that it had."""
    states = []
    for on_device in (0, 2, -1):
        run = training(device_layers=on_device)
        batches = token_batches(2)
        run.step(batches[0])
        run.engine.drain()
        weights = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(weights)
        run.engine.runtime.refresh_if_written()
        assert all(torch.equal(run.state()[f"master {name}"], weight.float()) for name, weight in weights.items())
        run.step(batches[1])
        run.engine.drain()
        states.append({key: value for key, value in run.state().items() if key.startswith(("master", "weight"))})
    for other in states[1:]:
        assert_equal_states(other, states[0])


def test_states_stay_on_the_host_while_one_of_several_optimizers_works_there() -> None:
    model = tiny_model().train()
    parameters = list(model.parameters())
    engine = attach(model, gpu_memory_gib=1.0, device_layers=None)
    plain = torch.optim.SGD(parameters[:6], lr=0.1)
    fused = torch.optim.AdamW(parameters[6:], lr=1e-3)
    drivers = [adopt_optimizer(optimizer, engine.runtime, "deferred") for optimizer in (plain, fused)]
    ids = token_batches(1)[0]
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for optimizer in (plain, fused):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert not any(unit.is_on_device for unit in engine.runtime.units)
    drivers[0].retire(TAKEN_OVER)
    assert engine.runtime.states_may_move


def test_an_optimizer_without_a_kernel_leaves_no_layer_on_the_device() -> None:
    model = tiny_model().train()
    run = training(model, torch.optim.SGD(model.parameters(), lr=0.1), device_layers=1)
    run.step(token_batches(1)[0])
    assert run.engine.device_plan.current.placement.on_device == frozenset()
    assert not run.engine.runtime.prefetcher.own_slots


def test_a_smaller_batch_is_planned_after_one_that_was_too_large_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    run = training(gpu_memory_gib=1.0)
    large, small = token_batches(1, batch=8)[0], token_batches(1, batch=2)[0]
    profile_step = device_plan.profile_step
    sent_bytes = device_plan.sent_bytes

    def no_room(*_: object) -> object:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(device_plan, "sent_bytes", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        run.step(large)
    monkeypatch.setattr(device_plan, "sent_bytes", sent_bytes)
    run.step(small)
    assert run.engine.device_plan.current.predicted_bytes > 0
    assert device_plan.profile_step is profile_step


def test_the_norm_of_a_gradient_that_was_replaced_on_the_device_is_taken_anew() -> None:
    run = training(device_layers=-1)
    ids = token_batches(1)[0]
    run.model(input_ids=ids, labels=ids).loss.backward()
    for parameter in run.model.parameters():
        shape = parameter.shape
        parameter.grad = None  # the next one may get its address
        parameter.grad = torch.zeros(shape, dtype=parameter.dtype)
    run.engine.runtime.collect_gradients()
    assert float(run.engine.runtime.clipping.total_norm(run.model.parameters())) == 0.0


def test_an_engine_that_finds_no_room_for_what_was_asked_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    def workers() -> set[int]:
        return {thread.ident or 0 for thread in threading.enumerate() if thread.name == "megatrain-step-worker"}

    before = workers()
    monkeypatch.setattr(host_store.DeviceMemory, "__init__", no_room)
    model = tiny_model()
    with pytest.raises(torch.OutOfMemoryError):
        attach(model, device_layers=2)
    assert workers() <= before
    assert all(parameter.is_cpu for parameter in model.parameters())
    assert model(input_ids=token_batches(1)[0]).logits.isfinite().all()

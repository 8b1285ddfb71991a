"""Exceptions in layers, refused memory and writes from outside leave a state that can be trained on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_runs import Training, assert_equal_states, attach, masters_of
from pairs import pairwise
from plain_torch import round_to_bf16, tiny_model, token_batches
from torch import nn

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.optim.fused_step import FusedStep
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.store.host_memory import HostMemory

pytestmark = pytest.mark.usefixtures("profiled_once")

# ---------------------------------------------------------------------------------------- exceptions in a layer


class AccidentError(Exception):
    """What a layer raises."""


@pytest.mark.parametrize(
    ("place", "position", "schedule"), pairwise(["forward", "backward"], [0, 2, 3], ["deferred", "serial"])
)
def test_an_exception_in_a_layer_leaves_the_engine_usable(trainings: Any, place: str, position: int, schedule: str) -> None:
    batches = token_batches(4)
    training, undisturbed = trainings(schedule), trainings(schedule)
    for each in (training, undisturbed):
        each.step(batches[0], max_norm=1.0)
    mlp = training.model.model.layers[position].mlp
    forward = mlp.forward

    def raise_in_backward(gradient: torch.Tensor) -> torch.Tensor:
        raise AccidentError(place)

    def accident(hidden: torch.Tensor) -> torch.Tensor:
        if place == "forward":
            raise AccidentError(place)
        output = forward(hidden)
        if output.requires_grad:
            output.register_hook(raise_in_backward)
        return output

    mlp.forward = accident
    with pytest.raises(AccidentError, match=place):
        training.step(batches[3], max_norm=1.0)
    del mlp.forward
    training.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in training.model.parameters())
    for ids in batches[1:]:
        assert training.step(ids, max_norm=1.0) == undisturbed.step(ids, max_norm=1.0)
    assert_equal_states(training.state(), undisturbed.state())


def test_a_backward_after_one_that_raised_ends_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # Both forwards are over before the first backward raises: no forward tells that it is over.
    model = tiny_model().train()
    runtime = attach(model).runtime
    ids = token_batches(1)[0]
    first, second = (model(input_ids=ids, labels=ids, output_hidden_states=True) for _ in range(2))

    def accident(gradient: torch.Tensor) -> torch.Tensor:
        raise AccidentError("backward")

    first.hidden_states[1].register_hook(accident)
    with pytest.raises(AccidentError):
        first.loss.backward()
    model.zero_grad()
    waits = []
    wait = runtime.offloader.wait
    monkeypatch.setattr(runtime.offloader, "wait", lambda: (waits.append(runtime.open_forwards), wait())[1])
    del first
    second.loss.backward()
    assert waits, "for the gradients' copies"
    assert runtime.open_forwards == 0
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    for gradient, parameter in zip(expected, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_exception_in_a_layer_leaves_the_backward_schedule_at_work(trainings: Any, place: str) -> None:
    # Layers above the accident were stepped already in `backward`; in forward nothing was.
    training, undisturbed = trainings("backward"), trainings("backward")
    batches = token_batches(3)
    mlp = training.model.model.layers[3].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: _fail(place, forward, hidden)
    with pytest.raises(AccidentError):
        training.step(batches[0])
    del mlp.forward
    training.optimizer.zero_grad()
    for ids in batches:
        assert training.step(ids) == undisturbed.step(ids)
    assert_equal_states(training.state(), undisturbed.state())
    assert isinstance(training.driver, FusedStep)
    assert training.driver.schedule == "backward"


def _fail(place: str, forward: Any, hidden: torch.Tensor) -> torch.Tensor:
    if place == "forward" or torch.is_grad_enabled():  # the replay runs with gradients
        raise AccidentError(place)
    output: torch.Tensor = forward(hidden)
    return output


def test_an_exception_in_evaluation_leaves_the_engine_usable(trainings: Any) -> None:
    training: Training = trainings()
    ids = token_batches(1)[0]
    with torch.no_grad():
        before = training.model(input_ids=ids).logits
        mlp = training.model.model.layers[1].mlp
        mlp.forward = lambda hidden: _fail("forward", None, hidden)
        for _ in range(5):  # more often than there are slots
            with pytest.raises(AccidentError):
                training.model(input_ids=ids)
        del mlp.forward
        assert torch.equal(training.model(input_ids=ids).logits, before)


# ---------------------------------------------------------------------------------------- registration


class FakeDriver:
    """Stands for the CUDA runtime: registers until its limit of bytes is reached."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if sum(self.registered.values()) + size > self.limit:
            self.last_error = 2  # cudaErrorMemoryAllocation
            return self.last_error
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def launch(self) -> None:
        """A kernel's launch, which raises the last error and clears it, as torch does after each."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


def fake_driver(limit: int, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver that registers memory and launches the kernels of ``torch.ones``."""
    driver, ones = FakeDriver(limit), torch.ones
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "ones", lambda *a, **k: driver.launch() if k.get("device") == "cuda" else ones(*a, **k))
    return driver


def test_a_refused_registration_is_an_error_with_size_code_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = fake_driver(3 << 20, monkeypatch)
    first = HostMemory(1 << 20, register=True)
    first.register()
    second = HostMemory(3 << 20, register=True)
    with pytest.raises(HostMemoryError, match=r"3\.00 MiB .*\(error 2\).*ulimit -l unlimited"):
        second.register()
    assert first.is_registered
    assert not second.is_registered
    first.close()
    assert driver.registered == {}
    second.register()  # now there is room
    assert second.is_registered
    second.close()
    assert driver.registered == {}


def test_a_refused_registration_is_not_the_error_of_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = fake_driver(0, monkeypatch)
    with pytest.raises(HostMemoryError):
        HostMemory(1 << 20, register=True).register()
    driver.launch()


def test_memory_is_page_locked_when_it_is_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = fake_driver(1 << 40, monkeypatch)
    from megatrain_accelerate.store import unit as host_store

    monkeypatch.setattr(host_store, "HostMemory", lambda size, register, shared: HostMemory(size, register=True))
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model)
    run = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    ids = token_batches(1)[0]

    def locked(kind: str) -> list[bool]:
        return [unit.memory[kind].is_registered for unit in engine.runtime.units if kind in unit.memory]

    layers, groups = [True] * len(engine.runtime.layers), [False] * len(engine.runtime.groups)
    assert driver.registered == {}
    with torch.no_grad():
        model(input_ids=ids)
    assert locked("weights") == layers + groups
    assert locked("gradients") == []
    run.step(ids)
    assert all(locked("weights")), "a step of resident groups pushes theirs"
    assert all(locked("gradients"))
    assert len(locked("gradients")) == len(engine.runtime.units)
    engine.runtime.place(range(len(layers)), groups_on_device=True)
    assert driver.registered == {}
    engine.close()


@pytest.mark.parametrize("when", ["adopting", "in the first forward"])
def test_a_refused_registration_leaves_the_plain_model(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The device is said to be a GPU for the registration only.
    model, reference = tiny_model(), tiny_model()
    layer_bytes = sum(2 * p.numel() for p in model.model.layers[0].parameters())
    driver = fake_driver(3 * layer_bytes, monkeypatch)
    from megatrain_accelerate.store import unit as host_store

    def registered(size: int, register: bool, shared: None) -> HostMemory:
        memory = HostMemory(size, register=True)
        if when == "adopting":
            memory.register()
        return memory

    monkeypatch.setattr(host_store, "HostMemory", registered)
    if when == "adopting":
        with pytest.raises(HostMemoryError, match="refused to page-lock"):
            attach(model)
    else:
        engine = attach(model)
        assert driver.registered == {}, "what moves to the device is never registered"
        for _ in range(2):
            with torch.no_grad(), pytest.raises(HostMemoryError, match="refused to page-lock"):
                model(input_ids=token_batches(1)[0])
        engine.close()
    assert driver.registered == {}, "everything that was registered must be let go"
    assert engine_of(model) is None
    assert [type(module) for module in model.modules()] == [type(module) for module in reference.modules()]
    ids = token_batches(1)[0]
    losses = []
    for each in (model, reference):
        loss = each(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert torch.equal(ours.grad, theirs.grad), name


# ---------------------------------------------------------------------------------------- writes from outside


def load_into(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(weights)


def copy_in_place(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def assign_data(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].to(parameter.dtype)


@pytest.mark.parametrize(
    ("write", "bf16", "schedule", "slots"),
    pairwise([load_into, copy_in_place, assign_data], [True, False], ["deferred", "backward"], [2, 6]),
)
def test_weights_written_from_outside_reach_masters_and_slots(
    trainings: Any, write: Any, bf16: bool, schedule: str, slots: int
) -> None:
    batches = token_batches(3)
    training: Training = trainings(schedule, bf16=bf16, slots=slots)
    training.step(batches[0])
    training.engine.drain()
    before = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    weights = {name: parameter.detach() for name, parameter in tiny_model(5).named_parameters()}
    write(training.model, weights)
    expected = tiny_model(5)
    for parameter in expected.parameters():
        # In place, or through load_state_dict, the weights take what their dtype holds; ties go to even in torch.
        parameter.data = parameter.data.to(torch.bfloat16) if bf16 else parameter.data
    ids = batches[1]
    with torch.no_grad():
        assert torch.equal(training.model(input_ids=ids).logits, expected(input_ids=ids).logits)
    training.engine.drain()
    masters = masters_of(training.engine, training.model)
    for name, parameter in expected.named_parameters():
        if bf16 and torch.equal(before[name], parameter):
            # Ones before and after: the master behind them stays if the data were assigned, which may only have moved.
            assert torch.equal(round_to_bf16(masters[name]), parameter)
            continue
        assert torch.equal(masters[name], parameter.float()), name
    training.step(batches[2])
    stepped = training.state()
    for name, parameter in expected.named_parameters():
        master = stepped[f"master {name}"]
        difference = (master - parameter.float()).abs()
        assert 0 < difference.max() < 3e-3, f"{name}: a step of lr 1e-3 from the written weights"
        weight = round_to_bf16(master) if bf16 else master
        assert torch.equal(stepped[f"weight {name}"], weight), f"{name}: the device's weight"


@pytest.mark.parametrize("slots", [2, 6])
def test_one_written_weight_is_seen_by_the_next_forward(trainings: Any, slots: int) -> None:
    training: Training = trainings(slots=slots)
    ids = token_batches(1)[0]
    with torch.no_grad():
        before = training.model(input_ids=ids).logits
        training.model.model.layers[1].mlp.down_proj.weight.mul_(2)
        after = training.model(input_ids=ids).logits
        training.model.model.layers[1].mlp.down_proj.weight.div_(2)
        assert torch.equal(training.model(input_ids=ids).logits, before)
    assert not torch.equal(before, after)


def test_cudart_is_not_touched_without_a_gpu(trainings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("registered memory on a machine without a GPU"))
    training: Training = trainings()
    training.step(token_batches(1)[0])
    assert SimpleNamespace(**training.engine.device_plan.budget.held_bytes_by_kind()).slots > 0

"""What goes wrong while training is said at once, with its cause, and leaves a state that can be trained on."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_runs import attach, masters_of
from plain_torch import round_to_bf16, tiny_model, token_batches
from torch import nn
from trainer_runs import examples, make_arguments, plugin
from transformers import Trainer

from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.errors import HostMemoryError, NonFiniteGradientError, StepWorkerError
from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.optim.fused_step import FusedStep
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.optim.host_step import HostStep
from megatrain_accelerate.optim.kernel import HostKernels

SCHEDULES = ("deferred", "serial", "backward")


@dataclasses.dataclass
class Training:
    """A model that streams, its optimizer, and one step of both."""

    model: nn.Module
    engine: Engine
    optimizer: torch.optim.Optimizer
    driver: HostStep

    def step(self, ids: torch.Tensor, max_norm: float | None = None) -> float:
        """One step on one batch."""
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        if max_norm is not None:
            self.engine.runtime.clip_grad_norm(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of masters, device weights and moments."""
        self.engine.drain()
        found = {f"master {name}": master for name, master in masters_of(self.engine, self.model).items()}
        found |= {f"weight {name}": parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for unit in self.engine.runtime.units:
            assert unit.exp_avgs is not None
            assert unit.exp_avg_sqs is not None
            found[f"exp_avg {unit.name}"] = unit.exp_avgs.clone()
            found[f"exp_avg_sq {unit.name}"] = unit.exp_avg_sqs.clone()
        for index, state in self.optimizer.state_dict()["state"].items():
            found[f"step {index}"] = state["step"].clone()
        return found


@pytest.fixture
def trainings() -> Iterator[Any]:
    """Makes trainings of equal models; their engines are closed at the end."""
    made: list[Training] = []

    def make(schedule: str = "deferred", bf16: bool = True, **settings: Any) -> Training:
        model = tiny_model()
        engine = attach(model, bf16=bf16, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        made.append(Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, schedule)))
        return made[-1]

    yield make
    for training in made:
        training.engine.close()


def assert_equal_states(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), f"{key} differs"


# ---------------------------------------------------------------------------------------- the step worker


class BrokenKernelError(Exception):
    """Stands for whatever can fail in the worker."""


@pytest.fixture
def broken_kernels(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From the moment when the event is set the fused kernel raises."""
    broken = threading.Event()
    adamw_split = HostKernels.adamw_split

    def fail(*args: Any) -> None:
        if broken.is_set():
            raise BrokenKernelError("disk on fire")
        adamw_split(*args)

    monkeypatch.setattr(HostKernels, "adamw_split", fail)
    return broken


@pytest.mark.timeout(60)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("use", ["forward", "step", "state_dict", "optimizer_state_dict", "load_state_dict", "drain"])
def test_a_failure_of_the_worker_reaches_the_next_use_with_its_cause(
    trainings: Any, broken_kernels: threading.Event, schedule: str, use: str
) -> None:
    training: Training = trainings(schedule)
    ids = token_batches(1)[0]
    training.step(ids)
    weights = copy.deepcopy(training.model.state_dict())
    broken_kernels.set()
    worker = training.engine.runtime.worker

    def worker_is_behind() -> bool:
        # A step without gradients waits for nothing: the failure reaches it once the worker has come to it.
        time.sleep(0.001)
        worker.raise_if_failed()
        return True

    uses = {
        "forward": lambda: training.model(input_ids=ids),
        "step": lambda: [training.optimizer.step() for _ in iter(worker_is_behind, False)],
        "state_dict": training.model.state_dict,
        "optimizer_state_dict": training.optimizer.state_dict,
        "load_state_dict": lambda: training.model.load_state_dict(weights),
        "drain": training.engine.drain,
    }

    def train_and_use() -> None:
        # In a serial step, and in backward, the failure is there before the next use.
        training.step(ids)
        uses[use]()

    with pytest.raises(StepWorkerError, match=r"BrokenKernelError: disk on fire.*resume from the last checkpoint") as raised:
        train_and_use()
    assert isinstance(raised.value.__cause__, BrokenKernelError)
    # It isn't forgotten: nothing can be built upon the half-applied step.
    with pytest.raises(StepWorkerError) as again:
        uses[use]()
    assert isinstance(again.value.__cause__, BrokenKernelError)


@pytest.mark.timeout(60)
def test_a_failure_of_the_worker_stops_the_trainer_and_its_save(broken_kernels: threading.Event, tmp_path: Path) -> None:
    with plugin():
        model = tiny_model()
        arguments = make_arguments(tmp_path, bf16=True, save_strategy="steps", save_steps=1)
        trainer = Trainer(model, arguments, train_dataset=examples())
        broken_kernels.set()
        with pytest.raises(StepWorkerError) as raised:
            trainer.train()
        assert isinstance(raised.value.__cause__, BrokenKernelError)
        assert not list(tmp_path.glob("checkpoint-*")), "weights of a failed step must not be saved"
        with pytest.raises(StepWorkerError):
            trainer.save_model(str(tmp_path / "saved"))
        assert not list(tmp_path.rglob("*.safetensors"))


# ---------------------------------------------------------------------------------------- non-finite gradients


def poison(training: Training, ids: torch.Tensor) -> None:
    """A step whose loss isn't a number."""
    loss = training.model(input_ids=ids, labels=ids).loss * float("nan")
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("before", [0, 2])
def test_a_non_finite_gradient_skips_the_step_counts_and_warns(
    trainings: Any, schedule: str, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    batches = token_batches(5)
    training, undisturbed = trainings(schedule), trainings(schedule)
    for ids in batches[:before]:
        training.step(ids)
        undisturbed.step(ids)
    counters = training.engine.runtime.meter.counters
    for count in (1, 2):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            poison(training, batches[0])
        assert counters.skipped_steps == count
        assert f"step skipped ({count} in a row, 4 allowed)" in caplog.text
        ours = {key: value for key, value in training.state().items() if not key.startswith("step") or value > 0}
        theirs = {key: value for key, value in undisturbed.state().items() if not key.startswith("step") or value > 0}
        assert_equal_states(ours, theirs)
    # And it trains on as if nothing had been.
    for ids in batches[before:]:
        assert training.step(ids) == undisturbed.step(ids)
    assert_equal_states(training.state(), undisturbed.state())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_too_many_non_finite_steps_in_a_row_stop_with_the_last_good_weights(trainings: Any, schedule: str) -> None:
    training: Training = trainings(schedule, max_nonfinite_steps=3)
    ids = token_batches(1)[0]
    training.step(ids)
    good = training.state()
    poison(training, ids)
    poison(training, ids)
    training.engine.drain()
    training.optimizer.zero_grad()
    training.step(ids)  # a good one in between: the count starts again
    good = training.state()
    poison(training, ids)
    poison(training, ids)
    with pytest.raises(NonFiniteGradientError, match=r"in 3 steps in a row.*max_nonfinite_steps"):
        poison(training, ids)
    assert_equal_states(training.state(), good)


@pytest.mark.parametrize("schedule", ["deferred", "serial"])
@pytest.mark.parametrize("position", [0, 3])
def test_one_non_finite_element_in_one_layer_skips_the_whole_step(trainings: Any, schedule: str, position: int) -> None:
    training: Training = trainings(schedule)
    ids = token_batches(1)[0]
    training.step(ids)
    good = training.state()
    training.model(input_ids=ids, labels=ids).loss.backward()
    gradient = training.model.model.layers[position].mlp.up_proj.weight.grad
    with torch.no_grad():
        gradient[3, 5] = float("inf")
    training.optimizer.step()
    assert_equal_states(training.state(), good)
    assert training.engine.runtime.meter.counters.skipped_steps == 1


def test_a_layer_with_a_non_finite_gradient_is_not_stepped_in_backward(trainings: Any) -> None:
    # The layers behind it were stepped already: `backward` can't take that back, but nothing non-finite gets in.
    training: Training = trainings("backward")
    ids = token_batches(1)[0]
    training.step(ids)
    good = training.state()
    model = training.model
    handle = model.model.layers[2].register_full_backward_pre_hook(lambda module, grads: (grads[0] * float("inf"), *grads[1:]))
    model(input_ids=ids, labels=ids).loss.backward()
    handle.remove()
    training.optimizer.step()
    training.optimizer.zero_grad()
    state = training.state()
    assert all(bool(value.isfinite().all()) for value in state.values())
    untouched = [f"model.layers.{index}." for index in (0, 1, 2)]
    for key, value in good.items():
        if any(part in key for part in untouched):
            assert torch.equal(state[key], value), key
    assert training.engine.runtime.meter.counters.skipped_steps == 1
    training.step(ids)
    assert all(bool(value.isfinite().all()) for value in training.state().values())


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_the_trainer_logs_skipped_steps_and_stops_when_they_do_not_pass(max_grad_norm: float, tmp_path: Path) -> None:
    class Poisoned(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, **kwargs)
            return loss * float("nan") if self.state.global_step in bad_steps else loss

    def run(folder: Path) -> Trainer:
        changes: dict[str, Any] = {"max_grad_norm": max_grad_norm, "bf16": True, "max_steps": 9}
        trainer = Poisoned(tiny_model(), make_arguments(folder, **changes), train_dataset=examples())
        trainer.train()
        return trainer

    with plugin():
        bad_steps = {1, 2, 5}
        trainer = run(tmp_path / "passing")
        counts = [log["megatrain/skipped_steps"] for log in trainer.state.log_history if "megatrain/skipped_steps" in log]
        assert counts == [0, 1, 2, 2, 2, 3, 3, 3, 3]
        assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
        bad_steps = set(range(2, 9))
        with pytest.raises(NonFiniteGradientError, match="5 steps in a row"):
            run(tmp_path / "stopping")


# ---------------------------------------------------------------------------------------- exceptions in a layer


class AccidentError(Exception):
    """What a layer raises."""


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("position", [0, 2, 3])
@pytest.mark.parametrize("schedule", ["deferred", "serial"])
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

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if sum(self.registered.values()) + size > self.limit:
            return 2  # cudaErrorMemoryAllocation
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_a_refused_registration_is_an_error_with_size_code_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(limit=3 << 20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    first = HostMemory(1 << 20, huge_pages=False, register=True)
    first.register()
    second = HostMemory(3 << 20, huge_pages=False, register=True)
    with pytest.raises(HostMemoryError, match=r"3\.00 MiB .*\(error 2\).*ulimit -l unlimited.*pin_memory"):
        second.register()
    assert first.is_registered
    assert not second.is_registered
    first.close()
    assert driver.registered == {}
    second.register()  # now there is room
    assert second.is_registered
    second.close()
    assert driver.registered == {}


def test_a_refused_registration_while_adopting_leaves_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # The device is said to be a GPU for the registration only.
    model, reference = tiny_model(), tiny_model()
    layer_bytes = sum(2 * p.numel() for p in model.model.layers[0].parameters())
    driver = FakeDriver(limit=3 * layer_bytes)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    from megatrain_accelerate.memory import host_store

    monkeypatch.setattr(
        host_store, "HostMemory", lambda size, huge_pages, register: HostMemory(size, huge_pages=False, register=True)
    )
    with pytest.raises(HostMemoryError, match="refused to page-lock"):
        attach(model)
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


@pytest.mark.parametrize("write", [load_into, copy_in_place, assign_data])
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("schedule", ["deferred", "backward"])
@pytest.mark.parametrize("slots", [2, 6])
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
            # Ones before and after: the master behind them may stay.
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
    assert SimpleNamespace(**training.engine.device_bytes_by_kind()).slots > 0

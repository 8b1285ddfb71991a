"""A step that fails, or has gradients that aren't finite, is said at once; the last good state stays."""

from __future__ import annotations

import copy
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Training, assert_equal_states
from plain_torch import tiny_model, token_batches
from torch import nn
from trainer_runs import examples, make_arguments, plugin
from transformers import Trainer

from megatrain_accelerate.errors import NonFiniteGradientError, StepWorkerError
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.optim.host_step import MOST_NONFINITE_STEPS

pytestmark = pytest.mark.usefixtures("profiled_once")

SCHEDULES = ("deferred", "serial", "backward")


# ---------------------------------------------------------------------------------------- the step worker


class BrokenKernelError(Exception):
    """Stands for whatever can fail in the worker."""


@pytest.fixture
def broken_kernels(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From the moment when the event is set the fused kernel raises."""
    broken = threading.Event()
    adamw = HostKernels.adamw

    def fail(*args: Any) -> None:
        if broken.is_set():
            raise BrokenKernelError("disk on fire")
        adamw(*args)

    monkeypatch.setattr(HostKernels, "adamw", fail)
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


@pytest.mark.parametrize("use", ["forward", "step", "state_dict", "drain"])
def test_a_failure_of_a_step_on_the_device_is_not_built_upon(
    trainings: Any, broken_kernels: threading.Event, use: str
) -> None:
    training: Training = trainings(device_layers=-1)  # the worker has nothing to do
    model, ids = training.model, token_batches(1)[0]
    training.step(ids)
    model(input_ids=ids, labels=ids).loss.backward()
    broken_kernels.set()
    with pytest.raises(BrokenKernelError):
        training.optimizer.step()
    broken_kernels.clear()
    uses = {
        "forward": lambda: model(input_ids=ids),
        "step": training.optimizer.step,
        "state_dict": model.state_dict,
        "drain": training.engine.drain,
    }
    with pytest.raises(StepWorkerError, match="resume from the last checkpoint"):
        uses[use]()


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
    training: Training = trainings(schedule)
    ids = token_batches(1)[0]
    training.step(ids)
    good = training.state()
    for _ in range(MOST_NONFINITE_STEPS - 1):
        poison(training, ids)
    training.engine.drain()
    training.optimizer.zero_grad()
    training.step(ids)  # a good one in between: the count starts again
    good = training.state()
    for _ in range(MOST_NONFINITE_STEPS - 1):
        poison(training, ids)
    with pytest.raises(NonFiniteGradientError, match="in 5 steps in a row"):
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

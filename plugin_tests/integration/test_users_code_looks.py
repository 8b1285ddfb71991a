"""Whoever reads or writes weights and gradients between two calls sees what plain PyTorch would show.

Steps are applied late here, so that code which doesn't wait for them reads other weights.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, both, gradients, loss_of, prepared, slow
from pairs import pairwise
from plain_torch import token_batches
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainer_runs import TrainerRun, examples, plugin, run_both, run_trainer, snapshot, tiny_llama
from transformers import Trainer, TrainerCallback

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.layers.runtime import StreamingRuntime

pytestmark = pytest.mark.usefixtures("profiled_once")

EVENTS = (
    *("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
    *("on_step_end", "on_epoch_end", "on_log"),
)
CLIPPING = pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])


class Late(TrainerCallback):
    """Steps are applied late from the first on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        slow(kwargs["model"])


class Average(Late):
    """An exponential average of the weights, as torch makes it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.average = AveragedModel(kwargs["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average.update_parameters(kwargs["model"])


class Looker(Late):
    """Notes all weights and gradients at one event, by the parameters themselves."""

    def __init__(self, event: str) -> None:
        self.seen: list[torch.Tensor | None] = []
        setattr(self, event, self._look)

    def _look(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter in kwargs["model"].parameters():
            self.seen.append(parameter.data.clone())
            self.seen.append(None if parameter.grad is None else parameter.grad.clone())


class Halving(Late):
    """Halves the gradients that there are at one event."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._halve)

    def _halve(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter in kwargs["model"].parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Shrinking(Late):
    """Writes the weights through ``parameter.data``, which no version counts, and in place."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in kwargs["model"].model.layers[1].parameters():
                parameter.mul_(0.9)


def both_with(make: Callable[[], TrainerCallback], folder: Path, **changes: Any) -> list[Any]:
    """The callbacks of a stock and a streamed run, which are compared."""
    made: list[Any] = []

    def options(model: nn.Module) -> dict[str, Any]:
        made.append(make())
        return {"callbacks": [made[-1]]}

    run_both(tiny_llama, folder, options=options, **{"max_steps": 4, **changes})
    return made


def assert_same_tensors(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, plain in zip(ours, theirs, strict=True):
        assert (mine is None) == (plain is None)
        if mine is not None and plain is not None:
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


@CLIPPING
def test_an_average_of_the_weights_in_a_callback_is_the_stock_one(tmp_path: Path, max_grad_norm: float) -> None:
    stock, streamed = both_with(Average, tmp_path, max_grad_norm=max_grad_norm)
    assert_same_tensors(list(streamed.average.module.parameters()), list(stock.average.module.parameters()))


@pytest.mark.parametrize(
    ("event", "accumulation", "max_grad_norm"),
    [
        *pairwise(
            ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_epoch_end", "on_log"],
            [1, 3],
            [0.0, 0.1],
        ),
        *(("on_substep_end", 3, max_grad_norm) for max_grad_norm in (0.0, 0.1)),
    ],
)
def test_a_callback_sees_weights_and_gradients_as_in_the_stock_trainer(
    tmp_path: Path, event: str, accumulation: int, max_grad_norm: float
) -> None:
    changes = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": accumulation, "max_steps": 3}
    stock, streamed = both_with(lambda: Looker(event), tmp_path, **changes)
    assert_same_tensors(streamed.seen, stock.seen)


@pytest.mark.parametrize(
    ("event", "join", "max_grad_norm"),
    pairwise(["on_substep_end", "on_pre_optimizer_step"], [False, True], [0.0, 0.1]),
)
def test_gradients_that_a_callback_changes_are_stepped(tmp_path: Path, event: str, join: bool, max_grad_norm: float) -> None:
    # What a sum over micro-batches rounds otherwise isn't to become a whole step of Adam's.
    changes = {"gradient_accumulation_steps": 2, "max_grad_norm": max_grad_norm, "adam_epsilon": 1e-3}
    changes["settings"] = {"join_micro_batches": join}
    both_with(lambda: Halving(event), tmp_path, **changes)


def test_weights_that_a_callback_changes_are_trained_on(tmp_path: Path) -> None:
    both_with(Shrinking, tmp_path)


class ReadsFirst(Trainer):
    """The loss has a penalty that is computed before the model runs."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        penalty = sum(parameter.detach().abs().sum() for parameter in model.parameters())
        return model(**inputs).loss * (1 + 1e-4 * penalty)


class Logs(Trainer):
    """Logs a sum over the weights."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs["weights"] = sum(float(parameter.detach().abs().sum()) for parameter in self.model.parameters())
        super().log(logs, *args, **kwargs)


@CLIPPING
@pytest.mark.parametrize("trainer_class", [ReadsFirst, Logs])
def test_methods_of_a_users_trainer_read_stepped_weights(
    tmp_path: Path, trainer_class: type[Trainer], max_grad_norm: float
) -> None:
    options = {"options": lambda model: {"callbacks": [Late()]}, "max_grad_norm": max_grad_norm}
    run_both(tiny_llama, tmp_path, trainer_class=trainer_class, **options)


def run_noting_unapplied_steps(folder: Path, **changes: Any) -> tuple[list[bool], TrainerRun]:
    """Whether steps were still to be applied when each forward began."""
    found: list[bool] = []

    def script(trainer: Trainer) -> None:
        def look(model: nn.Module, args: Any) -> None:
            engine = engine_of(model)
            found.append(engine is not None and not all(layer.gate.is_open for layer in engine.runtime.layers))

        trainer.model.register_forward_pre_hook(look)
        trainer.train()

    return found, run_trainer(tiny_llama, folder, streamed=True, script=script, max_steps=3, **changes)


class Harmless(Late):
    """Counts what is trained, and keeps a time: it reads no values."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained = {parameter for parameter in kwargs["model"].parameters() if parameter.requires_grad}
        self.counted = sum(parameter.numel() for parameter in trained if parameter.device.type == "cpu")


@CLIPPING
@pytest.mark.parametrize(
    ("callback", "trainer_class", "is_ahead"),
    [
        (Late, Trainer, True),
        (Harmless, Trainer, True),
        (Average, Trainer, False),
        (Late, ReadsFirst, False),
        (Late, Logs, False),
    ],
)
def test_a_step_runs_under_the_next_forward_unless_somebody_looks(
    tmp_path: Path, callback: type[TrainerCallback], trainer_class: type[Trainer], is_ahead: bool, max_grad_norm: float
) -> None:
    found, _ = run_noting_unapplied_steps(
        tmp_path,
        trainer_class=trainer_class,
        options=lambda model: {"callbacks": [callback()]},
        settings={"step_schedule": "deferred"},
        max_grad_norm=max_grad_norm,
    )
    assert found == [False, is_ahead, is_ahead]


def test_code_behind_a_training_that_raised_reads_stepped_weights(tmp_path: Path) -> None:
    class Raising(Late):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    def script(trainer: Trainer) -> None:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        optimizer = trainer.optimizer
        for ids in token_batches(2):
            trainer.accelerator.backward(loss_of(trainer.model, ids))
            optimizer.step()
            weights.append(snapshot(trainer.model))
            optimizer.zero_grad()

    weights: list[dict[str, torch.Tensor]] = []
    for streamed in (False, True):
        run_trainer(
            tiny_llama, tmp_path, streamed=streamed, script=script, options=lambda model: {"callbacks": [Raising()]}
        )  # fmt: skip
    for plain, ours in zip(weights[:2], weights[2:], strict=True):
        assert_same_tensors(list(ours.values()), list(plain.values()))


# ---------------------------------------------------------------- bare loops


@pytest.mark.parametrize("clipped", [True, False])
def test_a_loop_reads_stepped_weights_and_scaled_gradients_right_away(clipped: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        average = copy.deepcopy(dict(accelerator.unwrap_model(model).named_parameters()))
        observed: Observed = []
        for ids in token_batches(3):
            accelerator.backward(loss_of(model, ids))
            if clipped:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            observed += gradients(model)
            slow(model)
            optimizer.step()
            for name, parameter in accelerator.unwrap_model(model).named_parameters():
                average[name].data.lerp_(parameter.data, 0.1)
            observed += gradients(model)
            model.zero_grad()
        return model, [*observed, *(value.detach() for value in average.values())]

    both(script)


def ask_for_the_norm(accelerator: Accelerator, other: Any) -> None:
    other.zero_grad()
    accelerator.clip_grad_norm_(other.param_groups[0]["params"], 1.0)


def take_a_step_that_is_skipped(accelerator: Accelerator, other: Any) -> None:
    other.step()


@pytest.mark.parametrize("then", [ask_for_the_norm, take_a_step_that_is_skipped])
@pytest.mark.parametrize("other_class", [torch.optim.AdamW, torch.optim.SGD])
def test_a_loop_reads_weights_that_one_optimizer_stepped_before_another_was_at_work(
    then: Callable[[Accelerator, Any], None], other_class: type[torch.optim.Optimizer]
) -> None:
    with plugin():
        accelerator, model = Accelerator(cpu=True), tiny_llama()
        optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-2)
        other = other_class(model.lm_head.parameters(), lr=1e-2)
        model, optimizer, other = accelerator.prepare(model, optimizer, other)
        accelerator.backward(loss_of(model, token_batches(1)[0]))
        model.lm_head.weight.grad.fill_(torch.nan)
        before = snapshot(model)
        slow(model)
        optimizer.step()
        optimizer.zero_grad()
        then(accelerator, other)
        weight = model.model.layers[2].mlp.up_proj.weight
        read = weight.detach().clone()
        engine_of(model).drain()
        assert torch.equal(read, weight)
        assert not torch.equal(read, before["model.layers.2.mlp.up_proj.weight"])


def step_twice(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    optimizer.step()
    optimizer.step()


def clip_again_and_step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    optimizer.step()
    accelerator.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def replace_gradients_and_step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    for parameter in model.model.layers[1].parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()


def zero_and_step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    optimizer.step()
    model.zero_grad(set_to_none=False)
    optimizer.step()


@pytest.mark.parametrize("then", [step_twice, clip_again_and_step, replace_gradients_and_step, zero_and_step])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_what_a_loop_does_with_clipped_gradients_counts(
    then: Callable[[Accelerator, nn.Module, Any], None], optimizer_class: type[torch.optim.Optimizer]
) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        options = {"eps": 1e-2} if optimizer_class is torch.optim.AdamW else {"momentum": 0.9}
        model, optimizer = accelerator.prepare(model, optimizer_class(model.parameters(), lr=1e-2, **options))
        observed: Observed = []
        for ids in token_batches(2):
            accelerator.backward(loss_of(model, ids))
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            slow(model)
            then(accelerator, model, optimizer)
            observed += gradients(model)
            optimizer.zero_grad()
        return model, observed

    both(script)


def test_a_loop_writes_weights_right_after_a_step() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        for ids in token_batches(3):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            observed.append(loss.item())
            slow(model)
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            optimizer.zero_grad()
        return model, observed

    both(script)


def test_a_loop_reads_and_writes_gradients_between_micro_batches() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        slow(model)
        observed: Observed = []
        for place, ids in enumerate(token_batches(6)):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, ids))
                observed += gradients(model)
                if place == 1:
                    for parameter in model.parameters():
                        parameter.grad.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        return model, observed

    both(script, gradient_accumulation_steps=3)


def test_a_hook_of_the_optimizers_reads_stepped_weights_within_a_training(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def options(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: seen.append(next(iter(model.model.layers[2].parameters())).data.clone()))
        return {"optimizers": (optimizer, None), "callbacks": [Late()]}

    run_both(tiny_llama, tmp_path, options=options, dataset=examples(6))
    half = len(seen) // 2
    assert_same_tensors(seen[half:], seen[:half])


def drop_by_module(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()


def drop_by_optimizer(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


@pytest.mark.parametrize("drop", [drop_by_module, drop_by_optimizer])
def test_a_loop_that_does_not_look_is_not_waited_for(drop: Callable[[nn.Module, Any], None]) -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        slow(model)
        accelerator.backward(loss_of(model, token_batches(1)[0]))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        drop(model, optimizer)
        layers = engine_of(model).runtime.layers
        assert not all(layer.gate.is_open for layer in layers)
        _ = model.model.layers[0].mlp.up_proj.weight.data
        assert all(layer.gate.is_open for layer in layers)


def test_copies_and_pickles_of_watched_parameters_are_plain_parameters_with_stepped_values() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        for make in (copy.deepcopy, lambda weight: pickle.loads(pickle.dumps(weight))):
            slow(model)
            accelerator.backward(loss_of(model, token_batches(1)[0]))
            optimizer.step()
            weight = model.model.layers[1].mlp.up_proj.weight
            made = make(weight)
            assert type(made) is type(weight) is nn.Parameter
            assert torch.equal(made, weight)
            optimizer.zero_grad()


def test_a_model_that_is_copied_is_not_taken_for_one_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks refuse what a script writes to weights, but for a load."""
    loads: list[StreamingRuntime] = []
    monkeypatch.setattr(StreamingRuntime, "begin_loading", lambda runtime, *_: loads.append(runtime))
    with plugin():
        model, _ = prepared(Accelerator(cpu=True))
        copy.deepcopy(model)
        assert not loads
        model.load_state_dict(model.state_dict())
        assert loads


def test_another_thread_that_looks_sees_stepped_weights() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        slow(model)
        accelerator.backward(loss_of(model, token_batches(1)[0]))
        optimizer.step()
        with ThreadPoolExecutor(1) as thread:
            seen = thread.submit(lambda: model.model.layers[2].mlp.up_proj.weight.data.clone()).result()
        engine_of(model).drain()
        assert torch.equal(seen, model.model.layers[2].mlp.up_proj.weight)

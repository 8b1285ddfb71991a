"""Layers that are unfrozen or frozen while a model trains, in a loop or in a callback: as in plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine_runs import masters_of
from loop_runs import Observed, both, loss_of, train
from plain_torch import token_batches
from torch import nn
from trainer_runs import TrainerRun, examples, plugin, run_both, run_trainer, tiny_llama
from transformers import Trainer, TrainerCallback

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import HostMemoryError, StepWorkerError
from megatrain_accelerate.store import host_limits

pytestmark = pytest.mark.usefixtures("profiled_once")

Make = Callable[[Any], torch.optim.Optimizer]


def half_frozen() -> nn.Module:
    model = tiny_llama()
    for part in (model.model.embed_tokens, model.model.layers[0], model.model.layers[1].mlp, model.model.norm):
        part.requires_grad_(False)
    return model


def frozen_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


def clip(accelerator: Accelerator, model: nn.Module) -> float:
    return float(accelerator.clip_grad_norm_(model.parameters(), 0.5))


@pytest.mark.parametrize(
    "make",
    [
        # What rounding leaves of a gradient isn't to become a whole step.
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, eps=1e-3),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    ],
    ids=["adamw", "sgd"],
)
@pytest.mark.parametrize("joins", ["from the start", "when unfrozen", "after a forward"])
def test_a_loop_unfreezes_layers_and_freezes_others(make: Make, joins: str) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = half_frozen()
        frozen = frozen_of(model)
        held = model.parameters() if joins == "from the start" else [p for p in model.parameters() if p.requires_grad]
        model, optimizer = accelerator.prepare(model, make(held))
        observed = train(accelerator, model, optimizer, token_batches(2), clip)
        model.requires_grad_(True)
        if joins == "after a forward":
            accelerator.backward(loss_of(model, token_batches(1, seed=7)[0]))
            observed.append(clip(accelerator, model))
        if joins != "from the start":
            optimizer.add_param_group({"params": frozen})
        if joins == "after a forward":
            optimizer.step()
            optimizer.zero_grad()
        observed += train(accelerator, model, optimizer, token_batches(2, seed=4), clip)
        model.model.layers[1].requires_grad_(False)
        observed += train(accelerator, model, optimizer, token_batches(2, seed=5), clip)
        model.requires_grad_(True)
        observed += train(accelerator, model, optimizer, token_batches(1, seed=6), clip)
        return model, [*observed, len(optimizer.state_dict()["state"])]

    both(script)


@pytest.mark.parametrize("late_zeros", [False, True])
def test_gradients_that_are_there_when_layers_are_unfrozen_stay_as_they_are(late_zeros: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = half_frozen()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        first, second, third = token_batches(3)
        accelerator.backward(loss_of(model, first))
        if late_zeros:
            optimizer.step()
        model.requires_grad_(True)
        loss = loss_of(model, second)
        if late_zeros:
            optimizer.zero_grad()
        accelerator.backward(loss)  # adds up, or begins anew
        observed = [clip(accelerator, model)]
        optimizer.step()
        optimizer.zero_grad()
        return model, observed + train(accelerator, model, optimizer, [third], clip)

    both(script)


class Scaled(nn.Module):
    """Holds a parameter itself, beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return (inputs * self.scale).square().sum()


def test_a_step_that_failed_is_not_forgotten_when_layers_are_unfrozen() -> None:
    def fail() -> None:
        raise OSError("disk on fire")

    with plugin():
        accelerator, model = Accelerator(cpu=True), half_frozen()
        frozen = frozen_of(model)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        train(accelerator, model, optimizer, token_batches(1), clip)
        engine_of(model).runtime.worker.submit("step", fail)
        for parameter in frozen:
            parameter.requires_grad_(True)
        with pytest.raises(StepWorkerError, match="disk on fire"):
            loss_of(model, token_batches(1)[0])


def test_a_parameter_of_the_model_itself_is_unfrozen_and_no_hook_is_left_behind() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = Scaled()
        model.scale.requires_grad_(False)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        observed: Observed = []
        hooks = set()
        for step in range(6):
            if step == 2:
                model.scale.requires_grad_(True)
            loss = model(torch.linspace(-1, 1, 16).view(2, 8))
            accelerator.backward(loss)
            observed.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            hooks.add(len(model._forward_pre_hooks))
        assert len(hooks) == 1
        return model, observed

    both(script)


def test_it_is_said_once_and_refused_where_the_host_has_no_room(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model = half_frozen()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        model.model.layers[0].requires_grad_(True)
        with caplog.at_level(logging.WARNING):
            train(accelerator, model, optimizer, token_batches(3))
        assert sum("preparing it again" in record.message for record in caplog.records) == 1
        model.requires_grad_(True)
        with torch.no_grad():
            engine = engine_of(model)
            loss_of(model, token_batches(1)[0])
            assert engine_of(model) is engine, "nothing is trained in a forward without gradients"
        monkeypatch.setattr(host_limits, "available_host_bytes", lambda limit=None: 0)
        with pytest.raises(HostMemoryError):
            loss_of(model, token_batches(1)[0])


# ---------------------------------------------------------------------------------------- the Trainer


class Unfreezing(TrainerCallback):
    """Trains all of the model from a step on."""

    def __init__(self, at: int, adds: bool) -> None:
        self.at, self.adds = at, adds

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, frozen = kwargs["model"], frozen_of(kwargs["model"])
        if state.global_step >= self.at and frozen:
            model.requires_grad_(True)
            if self.adds:
                kwargs["optimizer"].param_groups[0]["params"].extend(frozen)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": 0.5},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 0.0, "settings": {"host_gradients": "passing"}},
        {"gradient_accumulation_steps": 2, "settings": {"join_micro_batches": True}},
    ],
    ids=["clipped", "in backward", "passing", "joined"],
)
def test_a_callback_unfreezes_layers(changes: dict[str, Any], adds: bool, tmp_path: Path) -> None:
    def options(model: nn.Module) -> dict[str, Any]:
        held = [parameter for parameter in model.parameters() if parameter.requires_grad or not adds]
        optimizer = torch.optim.AdamW(held, lr=1e-3, eps=1e-4)
        return {"optimizers": (optimizer, None), "callbacks": [Unfreezing(2, adds)]}

    stock, streamed = run_both(half_frozen, tmp_path, options=options, max_steps=5, **changes)
    counts = [len(run.trainer.optimizer.state_dict()["state"]) for run in (streamed, stock)]
    assert counts[0] == counts[1] == len(list(tiny_llama().parameters()))
    assert streamed.trainer.state.log_history[-2]["megatrain/h2d_gb"] > 0


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_that_unfreezes_resumes_to_the_bit(step: int, bf16: bool, tmp_path: Path) -> None:
    masters = []

    def options(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizers": (optimizer, constant), "callbacks": [Unfreezing(3, adds=False)]}

    def run(resumes: bool) -> TrainerRun:
        def script(trainer: Trainer) -> None:
            trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}") if resumes else None)
            engine = engine_of(trainer.model)
            engine.drain()
            masters.append(masters_of(engine, trainer.model))

        saves = {"save_strategy": "no" if resumes else "steps", "save_steps": step, "max_steps": 6, "bf16": bf16}
        return run_trainer(half_frozen, tmp_path, streamed=True, options=options, script=script, dataset=examples(), **saves)

    runs = [run(False), run(True)]
    assert all(torch.equal(masters[1][name], master) for name, master in masters[0].items())
    ours, theirs = (r.trainer.optimizer.state_dict()["state"] for r in reversed(runs))
    assert ours.keys() == theirs.keys()
    for key, entry in theirs.items():
        assert entry.keys() == ours[key].keys()
        assert all(torch.equal(torch.as_tensor(ours[key][name]), torch.as_tensor(value)) for name, value in entry.items())

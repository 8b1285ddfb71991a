"""Bare Accelerate loops, run with and without the plugin, fp32 on the CPU, for tests that compare the two."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from trainer_runs import TOLERANCE, assert_same_weights, plugin, tiny_llama

from megatrain_accelerate.engine import engine_of

Observed = list[Any]
Script = Callable[[Accelerator], tuple[nn.Module, Observed]]
Clip = Callable[[Accelerator, nn.Module], Any]


def both(script: Script, tolerance: float = TOLERANCE, settings: dict[str, Any] | None = None, **options: Any) -> Observed:
    """Runs a script without and with the plugin; compares what it observed and the weights. Returns the stock's."""
    results = []
    for streamed in (False, True):
        with plugin(streamed, **(settings or {})):
            torch.manual_seed(1)
            accelerator = Accelerator(cpu=True, **options)
            model, observed = script(accelerator)
            model = accelerator.unwrap_model(model)
            assert (engine_of(model) is not None) == streamed
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            results.append((observed, weights))
    (stock, stock_weights), (ours, our_weights) = results
    assert len(stock) == len(ours)
    for place, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        if isinstance(theirs, torch.Tensor):
            difference = float((mine - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))
            assert difference <= tolerance, f"observation {place} differs by {difference}"
        elif isinstance(theirs, float):
            assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance), f"observation {place}"
        else:
            assert mine == theirs, f"observation {place}"
    assert_same_weights(our_weights, stock_weights, tolerance)
    return stock


def adamw(model: nn.Module, **changes: Any) -> torch.optim.AdamW:
    """AdamW with a rate at which a few steps are seen, and an epsilon above the rounding of gradients near zero: of that its
    first steps would be whole ones, and processors round matrix products each in their own way."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6, **changes})


def loss_of(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The language model's loss on one batch."""
    return model(input_ids=ids, labels=ids, **inputs).loss


def gradients(model: nn.Module) -> Observed:
    """All gradients as Python sees them, by name; zero where there is none, which is noted too."""
    seen: Observed = []
    for parameter in model.parameters():
        seen.append(parameter.grad is None)
        if parameter.grad is not None:
            seen.append(parameter.grad.clone())
    return seen


def slow(model: nn.Module) -> None:
    """Steps that are taken from here on are applied late, unit by unit, if the model is streamed."""
    engine = engine_of(model)
    if engine is None or "submit" in vars(engine.runtime.worker):
        return
    submit = engine.runtime.worker.submit

    def submit_slowly(name: str, work: Callable[[], None]) -> Any:
        def slow_work() -> None:
            time.sleep(0.01)
            work()

        return submit(name, slow_work)

    engine.runtime.worker.submit = submit_slowly  # type: ignore[method-assign]


def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    batches: list[torch.Tensor],
    clip: Clip | None = None,
) -> Observed:
    """A plain loop; observes losses, what ``clip`` returned, and all gradients that the step used."""
    observed: Observed = []
    for ids in batches:
        loss = loss_of(model, ids)
        accelerator.backward(loss)
        observed.append(loss.item())
        if clip is not None:
            observed.append(clip(accelerator, model))
        slow(model)
        optimizer.step()
        optimizer.zero_grad()
    return observed


def prepared(accelerator: Accelerator, make: Callable[[], nn.Module] = tiny_llama, **changes: Any) -> tuple[nn.Module, Any]:
    """(model, AdamW), prepared."""
    model = make()
    return accelerator.prepare(model, adamw(model, **changes))

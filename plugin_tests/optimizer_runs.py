"""Runs with an optimizer that a script interferes with, beside the same by plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import Training, attach, masters_of
from plain_torch import tiny_model, token_batches
from torch import nn
from torch.optim import Optimizer

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

Change = Callable[[nn.Module, Optimizer], object]


def small_model() -> nn.Module:
    return tiny_model(num_hidden_layers=2, hidden_size=32, intermediate_size=64).train()


def streamed(
    make: Callable[[nn.Module], Optimizer] = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    schedule: str = "deferred",
    bf16: bool = False,
    **settings: Any,
) -> Training:
    model = small_model()
    engine = attach(model, bf16=bf16, **settings)
    optimizer = make(model)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, schedule))


def assert_equal_masters(ours: Training, theirs: Training) -> None:
    masters = masters_of(ours.engine, ours.model)
    for name, master in masters_of(theirs.engine, theirs.model).items():
        assert torch.equal(masters[name], master), name


def assert_same_as_torch(
    change: Change,
    make: Callable[[nn.Module], Optimizer] = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    schedule: str = "deferred",
    **settings: Any,
) -> Training:
    """fp32 runs with ``change`` after the second of four steps: streamed, and by plain torch."""
    run = streamed(make, schedule, **settings)
    model = small_model()
    optimizer = make(model)
    for step, ids in enumerate(token_batches(4)):
        if step == 2:
            change(run.model, run.optimizer)
            change(model, optimizer)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # fp32: the two differ by the rounding of AdamW's square root, 1e-7 of each update.
        assert run.step(ids) == pytest.approx(loss.item(), abs=2e-6)
    run.engine.drain()
    masters = masters_of(run.engine, run.model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(masters[name], parameter.detach(), rtol=0, atol=2e-5)
    ours, theirs = run.optimizer.state_dict(), optimizer.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for index, values in theirs["state"].items():
        assert ours["state"][index].get("step") == values.get("step")
        for key in ("exp_avg", "exp_avg_sq") if "exp_avg" in values else ():
            torch.testing.assert_close(ours["state"][index][key], values[key], rtol=1e-4, atol=1e-6)
    return run

"""Fixtures of several test files: trainings on the engine, and the plugin switched on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_runs import Training, attach
from plain_torch import tiny_model
from trainer_runs import plugin

from megatrain_accelerate.engine import all_engines
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer


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


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin is on, and the CPU not asked for by environment."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with plugin():
        yield
    for engine in all_engines():
        engine.close()

"""Layers that draw from Python's or NumPy's generator: a recompute draws what its forward drew, and nobody else's numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from loop_runs import both, prepared, train
from plain_torch import token_batches
from torch import nn
from trainer_runs import tiny_llama


class Noisy(nn.Module):
    """An MLP whose outputs are scaled by a number drawn anew in each call."""

    def __init__(self, inner: nn.Module, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner, self.draw = inner, draw

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) * self.draw()


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
@pytest.mark.parametrize("settings", [{}, {"kept_layers": 1}, {"micro_batch_size": 1}])
def test_numbers_of_python_and_numpy_are_drawn_again_in_a_recompute(
    draw: Callable[[], float], settings: dict[str, Any]
) -> None:
    drawn: list[float] = []

    def noted() -> float:
        drawn.append(float(draw()))
        return drawn[-1]

    def make() -> nn.Module:
        model = tiny_llama()
        for layer in model.model.layers:
            layer.mlp = Noisy(layer.mlp, noted)
        return model

    def script(accelerator: Accelerator) -> tuple[nn.Module, list[Any]]:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        model, optimizer = prepared(accelerator, make)
        observed = train(accelerator, model, optimizer, token_batches(3, batch=1))
        # What the script draws next is what it would draw without the plugin.
        return model, [*observed, float(draw())]

    both(script, settings=settings)
    assert len(set(drawn)) < len(drawn), "no layer was computed twice"

"""A script's own ``torch.utils.checkpoint`` around layers that stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, adamw, both
from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointing(nn.Module):
    """Recomputes each of its layers in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden)


@pytest.mark.parametrize(
    "settings",
    [
        {"kept_layers": 0, "device_layers": -1},
        {"device_layers": 1},
        {"micro_batch_size": 2},
        {"gpu_memory_gib": 1.0},
    ],
    ids=str,
)
def test_a_checkpoint_around_streamed_layers_trains_as_stock(settings: dict[str, Any]) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = Checkpointing()
        model, optimizer = accelerator.prepare(model, adamw(model))
        generator = torch.Generator().manual_seed(1)
        observed: Observed = []
        for _ in range(3):
            ids = torch.randint(0, 50, (4, 6), generator=generator)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
            accelerator.backward(loss)
            observed.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script, settings=settings)

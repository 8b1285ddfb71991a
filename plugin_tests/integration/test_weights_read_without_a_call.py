"""Weights outside the layers that others read without calling their module: they must be stepped before they are read."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, adamw, both, slow
from torch import nn

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.plan.layer_discovery import discover_layers

pytestmark = pytest.mark.usefixtures("profiled_once")

WIDTH = 16


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD + self.down(torch.tanh(self.up(hidden_BTD)))


class Tower(nn.Module):
    """Reads its positions as a table, as the towers of GLM-4.5V, SigLIP 2 and DeBERTa's encoder do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        # Behind the layers in the module, before them in the forward.
        self.positions = nn.Embedding(4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        hidden_BTD = hidden_BTD + self.positions.weight
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        return self.norm(hidden_BTD)


class Pooled(nn.Module):
    """Two towers; between them attention that reads its inner modules' weights (``nn.MultiheadAttention``)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, WIDTH)
        self.first = Tower()
        # Without biases: the true gradient of keys' is zero, and Adam makes whole steps of the rounding errors in its place.
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)
        self.second = Tower()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        seen = self.first(self.words(ids))
        mixed, _ = self.attention(seen, seen, seen, need_weights=False)
        return self.head(self.second(mixed)).square().mean()


def build() -> Pooled:
    torch.manual_seed(0)
    return Pooled()


def train_slowly(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
    model = build()
    model, optimizer = accelerator.prepare(model, adamw(model, lr=1e-2, eps=1e-4))
    generator = torch.Generator().manual_seed(2)
    observed: Observed = []
    for _ in range(4):
        loss = model(torch.randint(0, 8, (2, 4), generator=generator))
        accelerator.backward(loss)
        observed += [loss.item(), accelerator.clip_grad_norm_(model.parameters(), 1.0)]
        slow(model)
        optimizer.step()
        optimizer.zero_grad()
    return model, observed


def test_weights_that_are_read_without_a_call_are_stepped_before_they_are_read() -> None:
    both(train_slowly)


def test_groups_between_two_stacks_are_stepped_between_them() -> None:
    # Else the second stack's whole step would be waited for before the first thing behind the first stack.
    found = {spec.name: spec.layers_before for spec in discover_layers(build()).residents}
    assert found == {
        "first.positions": 0,
        "first.norm": 3,
        "attention": 3,
        "attention.out_proj": 3,
        "second.positions": 0,
        "second.norm": 6,
        "words": 0,
        "head": 6,
    }


@pytest.mark.usefixtures("active")
def test_units_are_stepped_in_the_order_of_the_forward() -> None:
    engine = engine_of(Accelerator(cpu=True).prepare(build()))
    assert engine is not None
    order = [part.unit.name for part in engine.runtime.in_forward_order()]
    blocks = [[f"{stack}.blocks.{i}" for i in range(3)] for stack in ("first", "second")]
    tables = ["words", "first.positions", "second.positions"]
    middle = ["first.norm", "attention", "attention.out_proj"]
    assert order == [*tables, *blocks[0], *middle, *blocks[1], "second.norm", "head"]

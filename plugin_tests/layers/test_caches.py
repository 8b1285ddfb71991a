"""Models whose layers return a cache where one was asked for, as those of old transformers and of remote code do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_runs import attach
from torch import nn


class Block(nn.Module):
    """Returns its cache among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, past_key_value: Any = None, use_cache: bool = False) -> tuple[Any, ...]:
        hidden = hidden + self.linear(hidden).tanh()
        return (hidden, past_key_value) if use_cache else (hidden,)


class Model(nn.Module):
    """Looks for the cache where it believes that there is one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.seen: list[bool] = []

    def forward(self, hidden: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        self.seen.append(use_cache)
        for layer in self.layers:
            outputs = layer(hidden, past_key_value=object() if use_cache else None, use_cache=use_cache)
            hidden = outputs[0]
            assert not use_cache or outputs[1] is not None
        return hidden


@pytest.mark.parametrize("how", ["by default", "keyword", "position"])
def test_a_model_that_expects_a_cache_from_its_layers_trains(how: str) -> None:
    inputs = torch.ones(2, 8)
    arguments = {"by default": (), "keyword": (), "position": (False,)}[how]
    keywords = {"use_cache": True} if how == "keyword" else {}
    plain, model = Model(), Model()
    engine = attach(model, bf16=False)
    for each in (plain, model):
        each(inputs, *arguments, **keywords).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert model.seen
    assert not any(model.seen)  # in the plan's run without data as well as in the batch itself
    model.seen.clear()
    with torch.no_grad():
        model(inputs)
    assert model.seen == [True], "without gradients the cache is the model's own matter"
    engine.close()

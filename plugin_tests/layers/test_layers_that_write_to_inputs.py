"""A layer that writes to what it gets can't be run again from it: an error that says so, whatever becomes of activations."""

from __future__ import annotations

import pytest
import torch
from engine_runs import attach
from torch import nn

from megatrain_accelerate.errors import UnsupportedError

WIDTH = 8


class Layer(nn.Module):
    """Writes to its hidden states, to its mask, or to a tensor of its own."""

    def __init__(self, writes_to: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.writes_to = writes_to

    def forward(self, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        update_BTD = self.linear(hidden_BTD) * mask_BT[..., None]
        if self.writes_to == "hidden":
            hidden_BTD += update_BTD
        elif self.writes_to == "mask":
            mask_BT.zero_()
        else:
            update_BTD += 1.0
        return hidden_BTD + update_BTD


class Stack(nn.Module):
    def __init__(self, writes_to: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH)
        self.layers = nn.ModuleList([Layer(writes_to) for _ in range(2)])

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTD, mask_BT = self.embedding(ids_BT), torch.ones(ids_BT.shape)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, mask_BT)
        return hidden_BTD.sum()


# One that is kept may: plugin_tests/numerics/test_ways_between_layers.py.
@pytest.mark.parametrize("writes_to", ["hidden", "mask"])
def test_a_recomputed_layer_that_writes_to_its_inputs_is_refused(writes_to: str) -> None:
    model = Stack(writes_to)
    attach(model, bf16=False, kept_layers=0)
    with pytest.raises(UnsupportedError, match=r"layer layers\.0 writes to its inputs in place.*layer_classes"):
        model(torch.tensor([[0, 1], [2, 3]]))


@pytest.mark.parametrize("kept_layers", [0, 2])
def test_a_layer_may_write_to_what_it_made_itself(kept_layers: int) -> None:
    torch.manual_seed(0)
    plain, streamed = (Stack("own") for _ in range(2))
    streamed.load_state_dict(plain.state_dict())
    engine = attach(streamed, bf16=False, kept_layers=kept_layers)
    for model in (plain, streamed):
        model(torch.tensor([[0, 1], [2, 3]])).backward()
    engine.runtime.collect_gradients()
    for ours, theirs in zip(streamed.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)

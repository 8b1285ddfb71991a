"""Parts of a layer that run by tiles, or mustn't: random numbers, settings that change, gradients that end."""

from __future__ import annotations

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.layers import token_tiles
from megatrain_accelerate.layers.token_tiles import TokenTiles

D, TILE = 16, 24


class Part(nn.Module):
    """An MLP with dropout, which notes how many elements it dropped of a real call."""

    def __init__(self, width: int = D, rate: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(rate)
        self.dropped: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.dropout(nn.functional.gelu(self.up(x)))
        if x.shape[1] > 8:  # no trial
            self.dropped.append(hash(tuple((made == 0).flatten().nonzero().flatten().tolist())))
        return self.down(made)


class Frozen(Part):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Layer(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x)


def tiled(layer: Layer, tiles: TokenTiles, x: torch.Tensor) -> torch.Tensor:
    with tiles.at_work((x,), {}):
        return layer(x)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(2, 32, D, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_trying_a_part_out_leaves_the_forwards_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "verdicts", {})
    model = tiny_model().train()
    parts = [Part(64, rate=0.5) for _ in model.model.layers]
    for layer, part in zip(model.model.layers, parts, strict=True):
        layer.mlp = part
    engine = attach(model, bf16=False, kept_layers=0, token_tile=TILE)
    # The inner model, so that no run without data has tried the part out before.
    model.model(input_ids=token_batches(1)[0]).last_hidden_state.pow(2).mean().backward()
    assert all(len(part.dropped) == 2 and part.dropped[0] == part.dropped[1] for part in parts)
    engine.close()


def test_a_part_that_could_write_into_a_list_runs_once_and_whole(
    monkeypatch: pytest.MonkeyPatch, tokens: torch.Tensor
) -> None:
    class Router(Part):
        def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            losses.append(x.square().mean())
            return super().forward(x)

    class Routed(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            losses: list[torch.Tensor] = []
            output = x + self.part(x, losses)
            return output * sum(losses)

    monkeypatch.setattr(token_tiles, "verdicts", {})
    layer = Routed(Router())
    plain = layer(tokens)
    tiles = TokenTiles.of_layer(layer)
    tiles.tile_tokens = TILE
    for _ in range(2):
        assert torch.equal(tiled(layer, tiles, tokens), plain)


def test_dropout_that_is_switched_on_later_ends_the_tiles(tokens: torch.Tensor) -> None:
    layer = Layer(Part())
    tiles = TokenTiles.of_layer(layer)
    tiles.tile_tokens = TILE
    tiled(layer, tiles, tokens)
    assert tiles.tiled_names == ["part"]
    layer.part.dropout.p = 0.5
    tiled(layer, tiles, tokens)
    assert tiles.tiled_names == []


def test_a_part_without_gradients_runs_by_tiles(tokens: torch.Tensor) -> None:
    layer = Layer(Frozen())
    tiles = TokenTiles.of_layer(layer)
    tiles.tile_tokens = TILE
    output = tiled(layer, tiles, tokens)
    torch.testing.assert_close(output, layer(tokens))
    (gradient,) = torch.autograd.grad(output.sum(), tokens)
    assert torch.equal(gradient, torch.ones_like(tokens))

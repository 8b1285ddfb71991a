"""``micro_batch_size`` on models whose layers don't have samples along dimension 0: refused, and right without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, both
from torch import nn
from trainer_runs import plugin

from megatrain_accelerate.errors import UnsupportedError

WIDTH = 32


class Layers(nn.Module):
    """Embeddings, three layers, a head; ``layers`` run by :meth:`through`."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)

    def through(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.through(self.embedding(ids)))


class TokensFirst(Layers):
    """torch's own encoder layers in their default layout (tokens, batch, width)."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__(lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=batch_first))

    def through(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().through(hidden.transpose(0, 1)).transpose(0, 1)


class TokensFirstThroughout(TokensFirst):
    """Its ids are (tokens, batch) too."""

    def through(self, hidden: torch.Tensor) -> torch.Tensor:
        return Layers.through(self, hidden)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(hidden * table)


class Tables(Layers):
    """Hands every layer a table (tokens, width)."""

    def __init__(self) -> None:
        super().__init__(Scaled)

    def through(self, hidden: torch.Tensor) -> torch.Tensor:
        table = torch.cos(torch.arange(hidden.shape[1])[:, None] / torch.arange(1, WIDTH + 1))
        for layer in self.layers:
            hidden = layer(hidden, table)
        return hidden


class Biased(Layers):
    """Hands every layer an attention bias (heads, 1, tokens)."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            query, key, value = self.project(hidden).unflatten(-1, (3, len(bias), -1)).permute(2, 0, 3, 1, 4)
            return hidden + ((query @ key.transpose(-1, -2) + bias).softmax(-1) @ value).transpose(1, 2).flatten(2)

    def __init__(self) -> None:
        super().__init__(self.Attention)

    def through(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = -torch.arange(1.0, 5.0)[:, None, None] * torch.arange(hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return hidden


class Normalised(Layers):
    """Layers with statistics of the batch."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.norm(self.linear(hidden).transpose(1, 2)).transpose(1, 2)

    def __init__(self) -> None:
        super().__init__(self.Layer)


class InEvaluation(Normalised):
    """Their statistics are those that they have, as of a frozen backbone."""

    def train(self, mode: bool = True) -> InEvaluation:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


def script(make: Callable[[], nn.Module], shape: tuple[int, int]) -> Callable[[Accelerator], tuple[nn.Module, Observed]]:
    """Three steps on ids of ``shape``."""

    def run(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        torch.manual_seed(0)
        model = make()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-1))
        model.train()
        generator = torch.Generator().manual_seed(1)
        observed: Observed = []
        for _ in range(3):
            ids = torch.randint(0, 50, shape, generator=generator)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            observed.append(loss.detach().clone())
        return model, observed

    return run


REFUSED = [
    (TokensFirst, (4, 12), r"shape \(12, 4, 32\), but the tensors that the model was called with have 4 rows"),
    (TokensFirst, (6, 6), "either dimension may be the batch"),
    (lambda: TokensFirst(batch_first=True), (4, 12), "dimension 0 isn't the batch"),
    (TokensFirstThroughout, (4, 12), "batch_first=False, so that dimension 0 is tokens and not samples"),
    (Tables, (6, 5), r"shape \(5, 32\) beside hidden states of shape \(6, 5, 32\)"),
    (Tables, (6, 6), "either dimension may be the batch"),
    (Biased, (4, 12), r"shape \(4, 1, 12\) beside hidden states of shape \(4, 12, 32\)"),
    (Normalised, (6, 5), "its norm is a batch norm in training mode, whose statistics need the whole batch"),
]


@pytest.mark.parametrize(("make", "shape", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_a_batch_that_cannot_be_told_is_refused_and_trains_whole(
    make: Callable[[], nn.Module], shape: tuple[int, int], reason: str
) -> None:
    run = script(make, shape)
    both(run)
    with plugin(micro_batch_size=1), pytest.raises(UnsupportedError, match=reason):
        run(Accelerator(cpu=True))


@pytest.mark.parametrize("make", [lambda: Layers(lambda: nn.Linear(WIDTH, WIDTH)), InEvaluation])
@pytest.mark.parametrize("size", [1, 4])
def test_a_batch_that_can_be_told_is_cut(make: Callable[[], nn.Module], size: int) -> None:
    both(script(make, (6, 5)), settings={"micro_batch_size": size}, tolerance=1e-5)

"""Which tokens go to which experts: the pairs of a token and one of its choices, sorted by expert.

T tokens, K choices of each, S = T K pairs, D hidden. Pair number s is choice s % K of token s // K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.streaming.expert_parts import ExpertPart, StreamedExperts

FULLEST_PART = 1.25
"""Of its even share of the pairs, what one part is supposed to get where memory is predicted without data: routers are never
quite even, least of all at the beginning."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The pairs of one part of the experts, n of them."""

    pairs_n: torch.Tensor
    tokens_n: torch.Tensor
    index_n1: torch.Tensor
    """Their experts, counted from the part's first: the ``top_k_index`` of tokens with one choice each."""

    def of(self, hidden_TD: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Their hidden states (n, D) and weights (n, 1), copies."""
        return hidden_TD[self.tokens_n], weights_TK.reshape(-1)[self.pairs_n].unsqueeze(1)


@dataclasses.dataclass(frozen=True)
class Routing:
    """The pairs of one call, sorted by expert; of one expert in the order of tokens."""

    tokens: int
    choices: int
    order_S: torch.Tensor
    experts_S: torch.Tensor
    bounds: tuple[int, ...]
    """Where in the order each part begins, and where the last one ends; pairs behind that have no expert."""

    @classmethod
    def of(cls, experts: StreamedExperts, index_TK: torch.Tensor, begins: Callable[[], torch.Tensor]) -> Routing:
        """Sorts the pairs. Waits for the device, to know how many go where; without data that is supposed.

        Args:
            experts: whose they are.
            index_TK: the expert of each pair; ``experts.count`` or more for a pair that goes to none.
            begins: gives int64 numbers on the same device: the first expert of each part, and ``experts.count``.
        """
        sorted_S, order_S = torch.sort(index_TK.reshape(-1), stable=True)
        if isinstance(index_TK, FakeTensor) or index_TK.is_meta:
            bounds = _supposed_bounds(order_S.numel(), experts)
        else:
            bounds = torch.searchsorted(sorted_S, begins().to(sorted_S.dtype)).tolist()
        return cls(index_TK.shape[0], index_TK.shape[1], order_S, sorted_S, tuple(bounds))

    @property
    def size_bytes(self) -> int:
        """Bytes that it holds on the device."""
        return self.order_S.nbytes + self.experts_S.nbytes

    def rows(self, place: int, part: ExpertPart) -> Rows | None:
        """The pairs of the part at ``place`` among the layer's; None if it has none."""
        begin, end = self.bounds[place : place + 2]
        if begin == end:
            return None
        pairs_n = self.order_S[begin:end]
        index_n1 = (self.experts_S[begin:end] - part.experts.first).unsqueeze(1)
        return Rows(pairs_n, torch.div(pairs_n, self.choices, rounding_mode="floor"), index_n1)

    def pair_buffer(self, like: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """Memory for one row of ``width`` a pair, or one number; zero where no part will write."""
        pairs = self.order_S.numel()
        shape = (pairs,) if width is None else (pairs, width)
        all_have_an_expert = self.bounds[-1] - self.bounds[0] == pairs
        return like.new_empty(shape) if all_have_an_expert else like.new_zeros(shape)

    def sum_of_choices(self, pairs_SD: torch.Tensor) -> torch.Tensor:
        """The sum over each token's choices, added in fp32 and rounded once: (T, D)."""
        return pairs_SD.view(self.tokens, self.choices, *pairs_SD.shape[1:]).sum(dim=1)


def _supposed_bounds(pairs: int, experts: StreamedExperts) -> list[int]:
    """Where each part begins if the first has more pairs than its share, and the others the rest as evenly as they can."""
    first = experts.parts[0].experts.experts
    fuller = min(pairs, int(FULLEST_PART * pairs * first / experts.count))
    others = experts.count - first
    ends = [fuller + (pairs - fuller) * (part.experts.last - first) // others if others else pairs for part in experts.parts]
    return [0, *ends]


def require_flat(experts: StreamedExperts, given: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Checks the arguments of a call of the experts, and returns them: hidden states (T, D), indices and weights (T, K).

    Raises:
        UnsupportedError: they aren't those that the parts can be cut by.
    """
    if len(given) == 3 and all(isinstance(argument, torch.Tensor) for argument in given):
        hidden_TD, index_TK, weights_TK = given
        fits = hidden_TD.dim() == index_TK.dim() == 2 and index_TK.shape == weights_TK.shape
        if fits and hidden_TD.shape[0] == index_TK.shape[0]:
            return hidden_TD, index_TK, weights_TK
    what = (str(tuple(arg.shape)) if isinstance(arg, torch.Tensor) else type(arg).__name__ for arg in given)
    raise UnsupportedError(
        f"experts {experts.name} are called with {', '.join(what)}, where hidden states (tokens, width), indices and weights "
        "(tokens, choices) are expected, and can't stream in parts; set megatrain_config.expert_parts to 1"
    )

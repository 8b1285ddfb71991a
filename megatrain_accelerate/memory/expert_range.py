"""Some of the experts of a layer: a range of dimension 0 of each of their parameters. Arithmetic only."""

from __future__ import annotations

import dataclasses

import torch

from megatrain_accelerate.memory.flat_layout import FlatEntry, FlatLayout


@dataclasses.dataclass(frozen=True)
class ExpertRange:
    """Experts ``first`` to ``last - 1`` of ``count``."""

    first: int
    last: int
    count: int

    @property
    def experts(self) -> int:
        """How many they are."""
        return self.last - self.first

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Their part of a tensor whose dimension 0 is that of all experts."""
        return tensor[self.first : self.last]

    def elements(self, entry: FlatEntry) -> tuple[int, int]:
        """Begin and end of their part of a parameter, in elements of it."""
        of_one = entry.spec.numel // self.count
        return self.first * of_one, self.last * of_one

    def layout(self, whole: FlatLayout) -> FlatLayout:
        """The layout of their parts of a unit's parameters."""
        specs = (entry.spec for entry in whole.entries)
        return FlatLayout(dataclasses.replace(spec, shape=(self.experts, *spec.shape[1:])) for spec in specs)


def expert_ranges(count: int, parts: int) -> list[ExpertRange]:
    """``count`` experts in ``parts`` ranges whose sizes differ by one at most, the larger ones first."""
    sizes = [count // parts + (place < count % parts) for place in range(parts)]
    return [ExpertRange(sum(sizes[:place]), sum(sizes[: place + 1]), count) for place in range(parts)]

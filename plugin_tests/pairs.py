"""Cases for tests of several parameters: each two values meet, which the whole product of them would repeat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The fewest cases that a greedy choice finds in which each two values of different parameters meet.

    Args:
        values: of each parameter.
    """

    def pairs(case: tuple[int, ...]) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    product = list(itertools.product(*(range(len(each)) for each in values)))
    missing = set().union(*map(pairs, product))
    chosen = []
    while missing:
        chosen.append(max(product, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return [tuple(each[place] for each, place in zip(values, case, strict=True)) for case in chosen]

"""Cases for tests of several parameters: each two values meet, which the whole product of them would repeat."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def long_unless(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those that aren't ``quick`` are for ``make test-long`` alone. A case is a tuple of arguments."""
    return [pytest.param(*case, marks=[] if case in quick else [pytest.mark.long]) for case in cases]


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

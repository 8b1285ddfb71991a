"""Loops over tiles, or parts of experts, and how few of them a run without data needs.

An operation on tensors without data takes as long as launching a real one, and a sequence of a million tokens has hundreds of
tiles with hundreds of operations each. Tiles are alike, so a few are run, and one of them counts for those that aren't.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

_Tile = TypeVar("_Tile")

_runs_few = False
_times = 1


@contextlib.contextmanager
def few_tiles() -> Iterator[None]:
    """Loops over tiles run few of them while the body runs, in every thread: autograd has its own for a device."""
    global _runs_few, _times
    before, _runs_few = _runs_few, True
    try:
        yield
    finally:
        _runs_few, _times = before, 1  # a loop that failed may not have ended


def times() -> int:
    """For how many tiles counts what runs now."""
    return _times


def tiles(every: Sequence[_Tile]) -> Iterator[_Tile]:
    """The tiles of a loop, in order; under :func:`few_tiles` the first two and the last: the second counts for all between.

    Args:
        every: all but the last are of one size. The first may find things that the others find made (a sum to add to).
    """
    global _times
    if not _runs_few or len(every) < 4:
        yield from every
        return
    yield every[0]
    before, _times = _times, _times * (len(every) - 2)
    try:
        yield every[1]
    finally:
        _times = before
    yield every[-1]

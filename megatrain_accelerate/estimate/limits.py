"""The largest batch and the longest sequence that fit."""

from __future__ import annotations

from collections.abc import Callable

MOST_BATCH = 1 << 14
"""Sequences of a batch that are tried."""
MOST_TOKENS = (1 << 22) - 1024
"""Of one sequence that is tried. Without data, positions of more tokens have no values (planning/fake_runs.py), and the
model makes a mask of all pairs of them, which it leaves out otherwise."""
_STEPS_OF_TOKENS = (1024, 64, 1)
_TOLERANCE = 0.02
"""Share of a limit by which it may be too small."""


def largest_batch(needs: Callable[[int], int], budget: int) -> int:
    """Sequences of the largest batch that fits, at most :data:`MOST_BATCH`; see :func:`largest`."""
    return largest(needs, budget, MOST_BATCH, _TOLERANCE)


def longest_context(needs: Callable[[int], int], budget: int, most: int) -> int:
    """Tokens of the longest sequence that fits: a multiple of 1,024, or, of few, of 64, or ``most``.

    Args:
        needs, budget: see :func:`largest`.
        most: the most tokens to try.
    """
    for step in _STEPS_OF_TOKENS:
        if most < step:
            continue
        steps = largest(lambda count, step=step: needs(count * step), budget, most // step, _TOLERANCE)  # type: ignore[misc]
        if steps == most // step and needs(most) <= budget:
            return most
        if steps:
            return steps * step
    return 0


def largest(needs: Callable[[int], int], budget: int, most: int, tolerance: float = 0.0) -> int:
    """The largest number from 1 to ``most`` whose need is within the budget; 0 if that of 1 isn't.

    Needs grow with the number, nearly in proportion for most models, so that the next to be tried is interpolated.

    Args:
        needs: of a number; each call is a run without data.
        budget: in the same unit.
        most: the largest to try.
        tolerance: share of the result by which it may be too small.
    """
    low, low_needs = 1, needs(1)
    if low_needs > budget:
        return 0
    high, high_needs = min(2, most), 0
    while low < most:
        high_needs = needs(high)
        if high_needs > budget:
            break
        if high == most:
            return most
        slope = (high_needs - low_needs) / (high - low)
        low, low_needs = high, high_needs
        further = low + int((budget - low_needs) / slope) + 1 if slope > 0 else most
        high = min(most, max(further, low + 1))
    else:
        return low
    interpolates = True
    while high - low > max(1, int(tolerance * low)):
        guess = low + int((high - low) * (budget - low_needs) / (high_needs - low_needs))
        middle = min(max(guess, low + 1), high - 1) if interpolates else (low + high) // 2
        before, taken = high - low, needs(middle)
        if taken <= budget:
            low, low_needs = middle, taken
        else:
            high, high_needs = middle, taken
        # Where needs bend, a line between the two ends moves one of them by little.
        interpolates = 2 * (high - low) <= before
    return low

"""The largest batch and the longest sequence that fit."""

from __future__ import annotations

from collections.abc import Callable

MOST_TOKENS = 1 << 22
"""Of one sequence that is tried."""


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

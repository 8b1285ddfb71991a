"""The usual batch: most batches are smaller than the largest that a plan covers, and need less memory for activations.

What lives where is chosen for a batch of the mean size of those so far, as far as the largest fits beside it with fewer kept
layers. So a few long batches don't send weights and states to the host for all the others: these batches recompute more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatrain_accelerate.plan.placement import sent_bytes
from megatrain_accelerate.plan.placement_search import Candidate, PlacementSearch
from megatrain_accelerate.plan.plan_record import PlanRecord
from megatrain_accelerate.plan.step_profile import StepOutline

MOST_USUAL_SHARE = 0.9
"""Where batches of the mean size have more than this share of the largest one's tokens, all are planned for as the largest."""

LINEAR_SHARE = 0.98
"""Of what a layer would keep for the usual batch if that grew with the tokens alone: rounding takes a little."""

SearchFor = Callable[[StepOutline, Mapping[str, Any]], PlacementSearch]


def place_both(
    plan: PlanRecord, share: float, usual: StepOutline, largest: StepOutline, search_for: SearchFor, fixed: Mapping[str, Any]
) -> tuple[PlanRecord, bool] | None:
    """The plan with a placement for the usual batch, that of ``share`` of the largest one's tokens, and one for the largest;
    None if there are none with the units in the same places. With it, whether the largest costs the others nothing: units live
    where the usual batch alone would have them, and batches between the two keep as many layers as fit.

    Args:
        search_for: gives the search for a step's placement with some :class:`~.placement.Counts` fixed.
        fixed: those that the settings leave no choice of.
    """
    if "kept" in fixed or (best := search_for(usual, fixed).best()) is None:
        return None
    found = _largest_beside(best, largest, search_for, fixed)
    if found is None:
        return None
    most, fixed = found
    moves = most.placement.on_device != best.placement.on_device
    if moves and (best := search_for(usual, fixed).best()) is None:
        return None
    calls = zip(usual.forward_calls, largest.forward_calls, strict=True)
    kept_bytes = [(usual.profiles[less.kind].kept_bytes, largest.profiles[more.kind].kept_bytes) for less, more in calls]
    differs_in_kept = dataclasses.replace(most.placement, kept=best.placement.kept) == best.placement
    is_linear = (
        differs_in_kept
        and len(most.placement.kept) <= len(best.placement.kept)
        and all(less >= LINEAR_SHARE * share * more for less, more in kept_bytes)
    )
    both = dataclasses.replace(
        plan,
        placement=most.placement,
        predicted_time=None if usual.surely_fits else best.time,
        offloaded_bytes=max(sum(sent_bytes(step, at.placement)) for step, at in ((usual, best), (largest, most))),
        usual_share=share,
        usual_placement=best.placement,
        usual_bytes=best.peak_bytes,
        is_linear=is_linear,
    )
    return both, is_linear and not moves


def _largest_beside(
    best: Candidate, largest: StepOutline, search_for: SearchFor, fixed: Mapping[str, Any]
) -> tuple[Candidate, Mapping[str, Any]] | None:
    """The largest batch's placement with as many layers on the device as there are with ``best``, or as many as fit, and the
    counts that it was found with."""
    for count in range(len(best.placement.on_device), -1, -1):
        there = {**fixed, "on_device": count, "groups_on_device": best.placement.groups_on_device}
        search = search_for(largest, there)
        if search.something_fits:
            # Each memory budget has a graph of its own, which takes time to compile.
            found = search.best_with(best.placement.budgets) or search.best()
            return None if found is None else (found, there)
    return None

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
"""Bytes that a layer keeps, over those that are reckoned, may be as few: rounding takes a little."""

SearchFor = Callable[[StepOutline, Mapping[str, Any]], PlacementSearch]


def place_both(
    plan: PlanRecord,
    share: float,
    step_at: Callable[[float], StepOutline | None],
    largest: StepOutline,
    search_for: SearchFor,
    fixed: Mapping[str, Any],
) -> tuple[PlanRecord, bool] | None:
    """The plan with a placement for the usual batch, that of ``share`` of the largest one's tokens, and one for the largest;
    None if there are none with the units in the same places. And whether that costs the usual batch nothing: units live where
    it alone would have them, and batches between the two keep as many layers as fit.

    Args:
        step_at: gives the step on a batch of a share of the largest one's tokens, None if it can't be told.
        search_for: gives the search for a step's placement with these :class:`~.placement.Counts` fixed.
        fixed: those that the settings leave no choice of.
    """
    usual = None if "kept" in fixed else step_at(share)
    if usual is None or (best := search_for(usual, fixed).best()) is None:
        return None
    if (found := _largest_beside(best, largest, search_for, fixed)) is None:
        return None
    most, there = found
    moves = any(getattr(most.placement, name) != getattr(best.placement, name) for name in ("on_device", "states_on_device"))
    if moves and (best := search_for(usual, there).best()) is None:
        return None
    fewer_kept = len(best.placement.kept) - len(most.placement.kept)
    differ_in_kept = dataclasses.replace(most.placement, kept=best.placement.kept) == best.placement and fewer_kept >= 0
    both = dataclasses.replace(
        plan,
        placement=most.placement,
        predicted_time=None if usual.surely_fits else best.time,
        offloaded_bytes=max(sum(sent_bytes(step, at.placement)) for step, at in ((usual, best), (largest, most))),
        usual_share=share,
        usual_placement=best.placement,
        usual_bytes=best.peak_bytes,
        is_linear=differ_in_kept and _keeps_in_proportion(share, usual, largest),
    )
    if both.is_linear and fewer_kept:
        # What else a batch takes may grow more slowly than its tokens (the loss takes tiles): one between the two tells.
        between = share**0.5
        step = step_at(between)
        fits = step is not None and search_for(step, there).fits(both.at(between)[0])
        both = dataclasses.replace(both, is_linear=fits)
    return both, both.is_linear and not moves


def _largest_beside(
    best: Candidate, largest: StepOutline, search_for: SearchFor, fixed: Mapping[str, Any]
) -> tuple[Candidate, Mapping[str, Any]] | None:
    """The largest batch's placement with as many layers, and states of others, on the device as there are with ``best``, or as
    many as fit unless that is fixed, and the counts that it was found with."""
    layers, states = len(best.placement.on_device), len(best.placement.states_on_device)
    fewer_states = [(layers, count) for count in range(states, -1, -1)]
    for on_device, stepped in fewer_states + [(count, 0) for count in range(layers - 1, -1, -1)]:
        there = {
            "groups_on_device": best.placement.groups_on_device,
            "on_device": on_device,
            "states_on_device": stepped,
            **fixed,
        }
        search = search_for(largest, there)
        if search.something_fits:
            # Each memory budget has a graph of its own, which takes time to compile.
            found = search.best_with(best.placement.budgets) or search.best()
            return None if found is None else (found, there)
    return None


def _keeps_in_proportion(share: float, usual: StepOutline, largest: StepOutline) -> bool:
    """Whether what layers keep grows at most in proportion to the tokens, and is as much for each layer."""
    less, more = ([step.profiles[call.kind].kept_bytes for call in step.forward_calls] for step in (usual, largest))
    if len(less) != len(more) or min(more) < LINEAR_SHARE * max(more):
        return False
    return all(own >= LINEAR_SHARE * share * of_largest for own, of_largest in zip(less, more, strict=True))

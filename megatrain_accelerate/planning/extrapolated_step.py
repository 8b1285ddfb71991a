"""Predicts a step on a new batch by scaling the step that was measured on another batch. Nothing is run or measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from megatrain_accelerate.planning.machine import Machine
from megatrain_accelerate.planning.step_memory import OpCosts
from megatrain_accelerate.planning.step_profile import LayerProfile, StepOutline
from megatrain_accelerate.planning.step_simulation import op_seconds

_BYTE_FIELDS = (
    "kept_bytes",
    "forward_bytes",
    "kept_forward_bytes",
    "kept_backward_bytes",
    "recomputed_bytes",
)
"""The fields of a :class:`LayerProfile` that are measured in bytes."""


def extrapolated_outline(
    estimate: StepOutline, measured_estimate: StepOutline, measured: StepOutline, machine: Machine
) -> StepOutline | None:
    """Returns the new batch's outline, with times and bytes scaled from the measured batch.

    A layer call's measured seconds are multiplied by the ratio of the two calls' estimated operation times, its measured bytes
    by the ratio of their estimated bytes. So most costs grow linearly with the tokens, and those of attention with the
    sequence length too.

    Args:
        estimate: the new batch's step, estimated from shapes only (:mod:`.step_outline`).
        measured_estimate: the measured batch's step, estimated in the same way.
        measured: the measured batch's step with its measured profiles.
        machine: its compute speed and memory bandwidth, which turn FLOPs and bytes of traffic into seconds.

    Returns:
        The scaled outline; None if the two steps call other layers or tile tokens differently, so that no ratio holds.
    """
    calls, measured_calls = estimate.forward_calls, measured_estimate.forward_calls
    if [call.layer for call in calls] != [call.layer for call in measured_calls]:
        return None
    if estimate.token_tile != measured_estimate.token_tile:
        return None
    profiles: dict[Hashable, LayerProfile] = {}
    for call, measured_call in zip(calls, measured_calls, strict=True):
        if call.kind not in profiles:  # calls of one kind have one profile
            kind = measured_call.kind
            profiles[call.kind] = _scaled_profile(
                estimate.profiles[call.kind], measured_estimate.profiles[kind], measured.profiles[kind], machine
            )
    outside_seconds = measured.outside_seconds
    if outside_seconds is not None:
        seconds = (op_seconds(outside_costs(outline), machine) for outline in (estimate, measured_estimate))
        outside_seconds *= _ratio(*seconds)
    return dataclasses.replace(estimate, profiles={**estimate.profiles, **profiles}, outside_seconds=outside_seconds)


def _scaled_profile(
    estimate: LayerProfile, measured_estimate: LayerProfile, measured: LayerProfile, machine: Machine
) -> LayerProfile:
    """Returns the measured profile of a layer's call, scaled to the new batch."""
    changes: dict[str, int | float | None] = {
        name: round(getattr(measured, name) * _ratio(getattr(estimate, name), getattr(measured_estimate, name)))
        for name in _BYTE_FIELDS
    }
    # Only large tensors leave: there may have been none on the measured batch.
    share = min(1.0, estimate.offloaded_bytes / max(1, estimate.kept_bytes))
    changes["offloaded_bytes"] = round(share * (changes["kept_bytes"] or 0))
    forward_ratio, backward_ratio, attention_ratio = (
        _ratio(op_seconds(getattr(estimate, name), machine), op_seconds(getattr(measured_estimate, name), machine))
        for name in ("forward", "backward", "attention")
    )
    for name, ratio in (
        ("forward_seconds", forward_ratio),
        ("kept_forward_seconds", forward_ratio),
        ("recompute_seconds", forward_ratio),
        ("backward_seconds", backward_ratio),
        ("attention_seconds", attention_ratio),
    ):
        seconds = getattr(measured, name)
        changes[name] = None if seconds is None else seconds * ratio
    return dataclasses.replace(estimate, **changes)  # type: ignore[arg-type]


def _ratio(after: float, before: float) -> float:
    """Returns ``after / before``; 1 if ``before`` is 0, so that a measured value stays as it is."""
    return after / before if before else 1.0


def outside_costs(outline: StepOutline) -> OpCosts:
    """Returns the costs of what runs outside the layers, from the start of the step to the first layer's backward.

    The costs of an event are those of what runs between the event before and this one.
    """
    events = [*outline.forward_calls, *[event for event in outline.events if event.is_backward][:1]]
    return OpCosts(sum(event.costs.flops for event in events), sum(event.costs.traffic_bytes for event in events))

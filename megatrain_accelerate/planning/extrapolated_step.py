"""A step on another batch, from the step that was measured: nothing runs, and nothing is measured anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from megatrain_accelerate.planning.machine import Machine
from megatrain_accelerate.planning.step_memory import OpCosts
from megatrain_accelerate.planning.step_profile import LayerProfile, StepOutline
from megatrain_accelerate.planning.step_simulation import op_seconds

_BYTES = (
    "kept_bytes",
    "offloaded_bytes",
    "forward_bytes",
    "kept_forward_bytes",
    "kept_backward_bytes",
    "recomputed_bytes",
)


def extrapolated(outline: StepOutline, before: StepOutline, measured: StepOutline, machine: Machine) -> StepOutline | None:
    """The outline with times and bytes in proportion to those that were measured on another batch.

    A layer's call takes as many times the measured seconds as its operations take those of the measured call, and as many
    times the measured bytes as its tensors without data take theirs: linear in the tokens, and quadratic where attention is.

    Args:
        outline: of the step, without data.
        before: of the step that was measured, without data.
        measured: the same with its measured profiles.
        machine: its speeds weigh products against memory traffic.

    Returns:
        None where the two steps call other layers, or their layers run in another way: there is no proportion then.
    """
    calls, calls_before = outline.forward_calls, before.forward_calls
    if [event.layer for event in calls] != [event.layer for event in calls_before] or outline.token_tile != before.token_tile:
        return None
    profiles: dict[Hashable, LayerProfile] = {}
    for call, call_before in zip(calls, calls_before, strict=True):
        if call.kind not in profiles:
            kind = call_before.kind
            profile = outline.profiles[call.kind]
            profiles[call.kind] = _in_proportion(profile, before.profiles[kind], measured.profiles[kind], machine)
    seconds = measured.outside_seconds
    if seconds is not None:
        seconds *= _ratio(op_seconds(_outside(outline), machine), op_seconds(_outside(before), machine))
    return dataclasses.replace(outline, profiles={**outline.profiles, **profiles}, outside_seconds=seconds)


def _in_proportion(profile: LayerProfile, before: LayerProfile, measured: LayerProfile, machine: Machine) -> LayerProfile:
    changes: dict[str, int | float | None] = {
        name: round(getattr(measured, name) * _ratio(getattr(profile, name), getattr(before, name))) for name in _BYTES
    }
    forward, backward, attention = (
        _ratio(op_seconds(getattr(profile, name), machine), op_seconds(getattr(before, name), machine))
        for name in ("forward", "backward", "attention")
    )
    for name, ratio in (
        ("forward_seconds", forward),
        ("kept_forward_seconds", forward),
        ("recompute_seconds", forward),
        ("backward_seconds", backward),
        ("attention_seconds", attention),
    ):
        seconds = getattr(measured, name)
        changes[name] = None if seconds is None else seconds * ratio
    return dataclasses.replace(profile, **changes)  # type: ignore[arg-type]


def _ratio(after: float, before: float) -> float:
    return after / before if before else 1.0


def _outside(outline: StepOutline) -> OpCosts:
    """The costs of what runs outside the layers from the step's begin to the first backward of a layer."""
    events = [*outline.forward_calls, *[event for event in outline.events if event.is_backward][:1]]
    return OpCosts(sum(event.costs.flops for event in events), sum(event.costs.traffic_bytes for event in events))

"""Which runs of a unit's flat states share the settings of a step; and the step of units that live on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch.autograd.graph import increment_version

from megatrain_accelerate.kernels.device import ParameterStep
from megatrain_accelerate.kernels.host import AdamArguments
from megatrain_accelerate.kernels.moments import Int8Moments
from megatrain_accelerate.store.flat_states import Segment
from megatrain_accelerate.store.layout import ALIGNMENT_ELEMENTS, ExpertRange
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.unit import HostUnit


def plan_segments(steps: Sequence[tuple[ParameterState, AdamArguments]]) -> list[Segment]:
    """Merges parameters that lie next to each other and share their settings, when the step is taken. The padding between two
    of them is stepped, too: its gradient is zero or finite garbage that no view ever shows. Not where moments are in 8 bits:
    it would have a part in their blocks' scales."""
    segments: list[Segment] = []
    for state, arguments in sorted(steps, key=lambda item: item[0].entry.weight_offset):
        entry, spec = state.entry, state.entry.spec
        assert entry.state_offset is not None
        is_sum = state.handle.has_fp32_sum
        if segments:
            last = segments[-1]
            gap = entry.state_offset - last.state_offset - last.elements
            widest = 1 if isinstance(state.moments, Int8Moments) else ALIGNMENT_ELEMENTS
            if (last.dtype, last.arguments, last.is_sum) == (spec.dtype, arguments, is_sum) and 0 <= gap < widest:
                last.elements += gap + spec.numel
                continue
        segments.append(Segment(spec.dtype, entry.state_offset, spec.numel, arguments, is_sum))
    return segments


def segments_of_experts(segments: Sequence[Segment], unit: HostUnit, experts: ExpertRange) -> list[Segment]:
    """What of a unit's segments are the parameters of these experts; those of all parts are the whole. A parameter in 8-bit
    moments whose experts don't begin with a block of theirs is stepped whole with the first part."""
    of_part: list[Segment] = []
    for state in unit.states:
        if (begin_of_parameter := state.entry.state_offset) is None:
            continue
        begin, end = experts.elements(state.entry)
        if isinstance(state.moments, Int8Moments) and state.entry.spec.numel // experts.count % ALIGNMENT_ELEMENTS:
            begin, end = (0, 0) if experts.first else (0, state.entry.spec.numel)
        of_part += segments_between(segments, begin_of_parameter + begin, begin_of_parameter + end)
    return of_part


def segments_between(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """What of the segments lies in the elements ``begin`` to ``end`` of the unit's states, as a rank's share of it does."""
    parts = []
    for segment in segments:
        first = max(begin, segment.state_offset)
        elements = min(end, segment.state_offset + segment.elements) - first
        if elements > 0:
            parts.append(dataclasses.replace(segment, state_offset=first, elements=elements))
    return parts


def step_on_device(units: Iterable[tuple[HostUnit, Sequence[tuple[ParameterState, AdamArguments]]]]) -> None:
    """Steps parameters of units that live on the device in place, each from its own ``parameter.grad``."""
    stepped, found = [(unit, steps) for unit, steps in units if steps], []
    for state, arguments in (step for _, steps in stepped for step in steps):
        gradient = state.parameter.grad
        assert gradient is not None
        assert state.moments is not None
        of_sum = state.gradient_residual if state.handle.has_fp32_sum else None
        first = state.entry.state_offset or 0
        tensors = (state.weight, state.residual, state.moments, gradient.contiguous())
        found.append(ParameterStep(*tensors, arguments, of_sum, first))
    if stepped:
        stepped[0][0].kernels.adamw_of_many(found)
    for unit, steps in stepped:
        unit.version += 1
        increment_version([state.parameter for state, _ in steps])  # autograd knows nothing of the kernel
        for state, _ in steps:
            state.handle.note_version()

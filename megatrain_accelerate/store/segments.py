"""The AdamW step of a unit's flat states: which runs of them share their settings, and what of a run lies in a share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from megatrain_accelerate.kernels.device import StepKernels
from megatrain_accelerate.kernels.host import AdamArguments, ParameterStep
from megatrain_accelerate.kernels.moments import Int8Moments, Moments
from megatrain_accelerate.store.layout import ALIGNMENT_ELEMENTS, ExpertRange, FlatLayout
from megatrain_accelerate.store.parameter import ParameterState


@dataclasses.dataclass
class Segment:
    """A run of adjacent parameters of one dtype that are stepped by one kernel call; ``is_sum``: whether their gradients are
    fp32 sums, with residuals."""

    dtype: torch.dtype
    state_offset: int
    elements: int
    arguments: AdamArguments
    is_sum: bool


class FlatStates(NamedTuple):
    """What a step reads and writes, from the element ``first`` of the unit's states on, all on one device. Weights and
    gradients are uint8, bf16 ones before fp32 ones as in the unit's layout; residuals are int16, of the bf16 weights, and of
    gradients that are fp32 sums."""

    first: int
    weights: torch.Tensor
    residuals: torch.Tensor
    moments: Moments
    gradients: torch.Tensor | None
    gradient_residuals: torch.Tensor | None


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


def segments_of_experts(segments: Sequence[Segment], states: Iterable[ParameterState], experts: ExpertRange) -> list[Segment]:
    """What of the segments of a unit, of whose parameters ``states`` are, is that of these experts; those of all parts are the
    whole. A parameter in 8-bit moments whose experts don't begin with a block of theirs is stepped whole with the first part.
    """
    of_part: list[Segment] = []
    for state in states:
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


def step_segments(layout: FlatLayout, states: FlatStates, segments: Sequence[Segment], kernels: StepKernels) -> None:
    """Steps weights, residuals and moments of these segments of a unit in place; ``kernels``: of where the states lie."""
    assert states.gradients is not None
    steps = []
    for segment in segments:
        first = segment.state_offset - states.first
        elements = slice(first, first + segment.elements)
        begin = layout.byte_of(segment.state_offset) - layout.byte_of(states.first)
        weights = slice(begin, begin + segment.elements * segment.dtype.itemsize)
        assert states.gradient_residuals is not None or not segment.is_sum
        steps.append(
            ParameterStep(
                states.weights[weights].view(segment.dtype),
                states.residuals[elements] if segment.dtype == torch.bfloat16 else None,
                states.moments.run(first, segment.elements),
                states.gradients[weights].view(segment.dtype),
                segment.arguments,
                states.gradient_residuals[elements] if segment.is_sum and states.gradient_residuals is not None else None,
                segment.state_offset,
            )
        )
    kernels.adamw_of_many(steps)

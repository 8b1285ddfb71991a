"""The AdamW step of a unit's flat states: which parameters are stepped together, and which of them are in a share."""

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
    """Adjacent parameters of one dtype that one kernel call steps. ``is_sum``: gradients are fp32 sums, with residuals."""

    dtype: torch.dtype
    state_offset: int
    elements: int
    arguments: AdamArguments
    is_sum: bool


class FlatStates(NamedTuple):
    """What a step reads and writes, from element ``first`` of the unit's states on, all on one device. Weights and gradients
    are uint8, bf16 before fp32 as in the layout. bf16 weights have int16 residuals, and gradients if they are fp32 sums."""

    first: int
    weights: torch.Tensor
    residuals: torch.Tensor
    moments: Moments
    gradients: torch.Tensor | None
    gradient_residuals: torch.Tensor | None


def plan_segments(steps: Sequence[tuple[ParameterState, AdamArguments]]) -> list[Segment]:
    """Merges parameters that are adjacent and share their settings, when the step is taken. The padding between two of them is
    stepped, too: its gradient is zero or finite garbage that no view ever shows. With 8-bit moments they aren't merged across
    padding, which would affect the scales of its blocks."""
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
    """The elements of a unit's segments that belong to these experts. ``states`` are those of the unit's parameters. All parts
    together have the whole. If a parameter has 8-bit moments whose blocks straddle experts, the first part steps all of it."""
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
    """The segments' elements between ``begin`` and ``end - 1`` of the unit's states, such as a rank's share of them."""
    parts = []
    for segment in segments:
        first = max(begin, segment.state_offset)
        elements = min(end, segment.state_offset + segment.elements) - first
        if elements > 0:
            parts.append(dataclasses.replace(segment, state_offset=first, elements=elements))
    return parts


def step_segments(layout: FlatLayout, states: FlatStates, segments: Sequence[Segment], kernels: StepKernels) -> None:
    """Steps weights, residuals and moments of these segments in place. ``kernels``: those of the states' device."""
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

"""A unit's flat states, whole or a share of them, wherever they lie, and the AdamW step of runs of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatrain_accelerate.kernels.device import ParameterStep, StepKernels
from megatrain_accelerate.kernels.host import AdamArguments
from megatrain_accelerate.kernels.moments import Moments
from megatrain_accelerate.store.layout import FlatLayout


@dataclasses.dataclass
class Segment:
    """A run of adjacent parameters of one dtype that are stepped by one kernel call."""

    dtype: torch.dtype
    state_offset: int
    """Element offset in residuals and moments."""
    elements: int
    arguments: AdamArguments
    is_sum: bool
    """Whether the gradients are fp32 sums, with residuals."""


class FlatStates(NamedTuple):
    """What a step reads and writes, from the element ``first`` of the unit's states on, all on one device."""

    first: int
    weights: torch.Tensor
    """uint8: bf16 weights, then fp32 ones, as in the unit's layout."""
    residuals: torch.Tensor
    """int16, of the bf16 weights."""
    moments: Moments
    gradients: torch.Tensor | None
    """uint8, as the weights."""
    gradient_residuals: torch.Tensor | None
    """int16, of the gradients that are fp32 sums."""


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

"""Batches of other sizes: whether a plan covers them, how a larger batch is made to plan for, and what a step on it costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.layers.nested_tensors import Inputs
from megatrain_accelerate.layers.padding import RealTokens
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.step_profile import SECONDS, LayerProfile, StepProfile

FREE_GROWTH = 3.0
"""Factor by which the batches that a plan covers exceed those so far, if sizes vary and this costs the usual batch nothing
(:func:`.place_both`). Of 40 orders of a library's functions as documents, 8 a batch, 12 led to new plans after the fiftieth
batch with 2.0, and one with 3.0."""

GROWTH_FACTORS = (1.5, 2.0)
"""The factor if it costs something: in the first two plans (none in the first while sizes don't vary), and in later ones. Its
root is tried if batches of that size don't fit."""


@dataclasses.dataclass(frozen=True)
class BatchExtent:
    """The size of a batch as far as a step's memory depends on it: that of attention grows with tokens times length."""

    elements: int = 0
    """Elements of all input tensors together, including labels and masks. Scalars don't count."""
    length: int = 0
    """Sequence length of text, padding included. 0 for other inputs, which are compared by their elements alone."""
    real: int = 0
    """Tokens of text that large parts of the layers compute: all, or without padding where that is left out."""

    @classmethod
    def of(cls, inputs: Inputs, real: RealTokens | None = None) -> BatchExtent:
        """The extent of a batch, given as keyword arguments of a model's forward."""
        elements = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim())
        if not (text := _text(inputs)):
            return cls(elements)
        ids = next(iter(text.values()))
        return cls(elements, ids.shape[1], ids.numel() if real is None else len(real.index))

    def covers(self, other: BatchExtent) -> bool:
        """Whether a step on a batch of the other extent needs no more memory than one on a batch of this extent."""
        is_shorter = not self.length or (other.length <= self.length and other.real <= self.real)
        return is_shorter and other.elements <= self.elements

    def share_of(self, largest: BatchExtent, in_a_row: bool) -> float:
        """The share of the tokens of a ``largest`` batch that covers this one. ``in_a_row``: padding is left out."""
        if in_a_row and largest.real:
            return self.real / largest.real
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(largest), strict=True)
        return max((own / most for own, most in pairs if most), default=1.0)

    def union(self, other: BatchExtent) -> BatchExtent:
        """The smallest extent that covers both."""
        return BatchExtent(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))


def row_size(inputs: Inputs) -> int:
    """Elements of one row of all inputs, inputs with equally long rows counted once: of text, the sequence length."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim() > 1]
    return sum({math.prod(tensor.shape[1:]) for tensor in tensors})


def sizes_after(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The row sizes (:func:`row_size`) that are noted of a training, with one more batch's ``size``: those of the first two
    batches, and of up to two later ones that differ from all before."""
    return sizes if len(sizes) > 1 and (size in sizes or sizes_vary(sizes)) else (*sizes, size)


def sizes_vary(sizes: tuple[int, ...]) -> bool:
    """Whether row sizes vary from batch to batch. A single odd one, as at the end of an epoch, doesn't show that."""
    return len(sizes) > 3 or len({*sizes[:2]}) > 1


def resized_batch(
    model: nn.Module, inputs: Inputs, extent: BatchExtent, growth: float
) -> tuple[dict[str, Any], RealTokens | None] | None:
    """A batch of text with ``growth`` times the tokens and length of ``extent``, and which of its tokens are real. It repeats
    ``inputs``, a model's arguments. If the model limits the length (``max_position_embeddings``), there are more sequences
    instead. None if a batch has more than text: an image can't be repeated apart from its tokens."""
    text = _text(inputs)
    if not text or not extent.length:
        return None
    input_sequences, input_length = next(iter(text.values())).shape
    length = math.ceil(growth * extent.length)
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        length = min(length, max(extent.length, limit))
    # Ids, labels and masks have one shape, and the extent's elements count all of them.
    sequences = math.ceil(growth * extent.elements / len(text) / length)
    copies = (math.ceil(sequences / input_sequences), math.ceil(length / input_length))
    made = {name: value.repeat(copies)[:sequences, :length].contiguous() for name, value in text.items()}
    in_each, more = divmod(min(math.ceil(growth * extent.real), sequences * length), sequences)
    lengths = [in_each + (row < more) for row in range(sequences)]
    return {**inputs, **made}, RealTokens.of(lengths, length, next(iter(made.values())).device)


def _text(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Token ids, labels and masks by name. Empty unless all tensors but scalars are integer or bool, of one shape (B, T)."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()}
    shapes = {tuple(value.shape) for value in tensors.values()}
    is_text = len(shapes) == 1 and all(value.dim() == 2 and not value.is_floating_point() for value in tensors.values())
    return tensors if is_text else {}


def extrapolated_profile(
    estimate: StepProfile, measured_estimate: StepProfile, measured: StepProfile, machine: Machine
) -> StepProfile | None:
    """A new batch's profile, scaled from the measured batch. A call's measured seconds are multiplied by the ratio of the
    estimated operation times, its measured bytes by that of the estimated bytes. So most costs grow linearly with the tokens,
    and those of attention with the length too. None if the steps call other layers or tile tokens differently."""
    calls, measured_calls = estimate.forward_calls, measured_estimate.forward_calls
    calls_others = [call.layer for call in calls] != [call.layer for call in measured_calls]
    if calls_others or estimate.token_tile != measured_estimate.token_tile:
        return None
    profiles: dict[Hashable, LayerProfile] = {}
    for call, measured_call in zip(calls, measured_calls, strict=True):
        if call.kind not in profiles:  # calls of one kind have one profile
            kind = measured_call.kind
            before, after = measured_estimate.profiles[kind], measured.profiles[kind]
            profiles[call.kind] = _scaled_profile(estimate.profiles[call.kind], before, after, machine)
    outside_seconds = measured.outside_seconds
    if outside_seconds is not None:
        outside_seconds *= _ratio(outside_seconds_of(estimate, machine), outside_seconds_of(measured_estimate, machine))
    return dataclasses.replace(estimate, profiles={**estimate.profiles, **profiles}, outside_seconds=outside_seconds)


def _scaled_profile(
    estimate: LayerProfile, measured_estimate: LayerProfile, measured: LayerProfile, machine: Machine
) -> LayerProfile:
    changes: dict[str, Any] = {
        name: round(getattr(measured, name) * _ratio(getattr(estimate, name), getattr(measured_estimate, name)))
        for name in ("kept_bytes", "forward_bytes", "kept_forward_bytes", "kept_backward_bytes", "recomputed_bytes")
    }
    for name, costs in SECONDS.items():
        now, before = (getattr(profile, costs).seconds(machine) for profile in (estimate, measured_estimate))
        seconds = getattr(measured, name)
        changes[name] = None if seconds is None else seconds * _ratio(now, before)
    return estimate.keeping(budgets=measured.budgets, **changes)


def _ratio(after: float, before: float) -> float:
    """``after / before``, or 1 if ``before`` is 0, so that a measured value stays as it is."""
    return after / before if before else 1.0


def outside_seconds_of(step_profile: StepProfile, machine: Machine) -> float:
    """Estimated seconds of what runs outside the layers from the step's start to its first backward of a layer. An event's
    costs are those of what runs between the event before and this one."""
    backward = [event for event in step_profile.events if event.is_backward]
    return sum(event.costs.seconds(machine) for event in [*step_profile.forward_calls, *backward[:1]])

"""The profile of a training step, from which placements are chosen: costs of each layer's call, and of what runs between."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from megatrain_accelerate.layers.compiled_layer import EVERYTHING, NOTHING, MemoryBudget
from megatrain_accelerate.layers.micro_batches import BatchSplit
from megatrain_accelerate.plan.step_memory import OpCosts


@dataclasses.dataclass(frozen=True)
class SavedInForward:
    """What an uncompiled forward that keeps its graph tells about a compiled one."""

    operand_bytes: int
    """Bytes that autograd saved besides inputs and weights: what products and attention read or made, and softmax made."""
    score_bytes: int
    """The part of :attr:`operand_bytes` that softmax made and products read as it is, padding included."""
    output_bytes: int
    costs: OpCosts
    """Costs of the forward up to the last saved tensor."""


SECONDS = {
    **dict.fromkeys(("forward_seconds", "kept_forward_seconds", "recompute_seconds"), "forward"),
    "backward_seconds": "backward",
    "attention_seconds": "attention",
}
"""Names of the measured times of a :class:`LayerProfile`, each with the name of the costs in proportion to which it grows."""


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """The costs of one layer call on the device. Bytes exclude what is allocated when the call begins."""

    forward: OpCosts
    backward: OpCosts
    kept_bytes: int
    """Bytes that a kept layer's graph holds from forward to backward, without its inputs and outputs."""
    offloaded_bytes: int
    """The part of :attr:`kept_bytes` that is copied to the host if the layer is offloaded."""
    input_bytes: int
    """Bytes that are copied to the host if the inputs are offloaded."""
    forward_bytes: int
    """Peak of a forward without a graph."""
    kept_forward_bytes: int
    """Peak of a forward that keeps its graph."""
    kept_backward_bytes: int
    """Peak of a backward, above :attr:`kept_bytes`. It includes the weights' gradients."""
    recomputed_bytes: int
    """Peak of a backward that recomputes first."""
    inputs_need_grad: tuple[bool, ...]
    """Says of each tensor among the arguments whether it needs a gradient."""
    attention: OpCosts = dataclasses.field(default_factory=OpCosts)
    """The part of :attr:`forward` that attention's kernels take."""
    attention_bytes: int = 0
    """Bytes of attention's results."""
    experts: OpCosts = dataclasses.field(default_factory=OpCosts)
    """The part of :attr:`forward` that experts in parts take. A recomputed layer keeps their results if its inputs stay."""
    expert_bytes: int = 0
    """Bytes of these experts' results."""
    pieces: int = 1
    piece_share: float = 1.0
    """The share of the batch that is in its first piece. No other is larger, and the last may be smaller."""
    length: int = 0
    """Tokens of a sequence as the layer is given it. 0 if its inputs have no such dimension."""
    forward_seconds: float | None = None
    """Measured (:mod:`.layer_measurement`). If this or another time is None, it is estimated from the costs."""
    kept_forward_seconds: float | None = None
    recompute_seconds: float | None = None
    """Time that recompute adds to a backward. None: as much as a forward that keeps its graph. Compiled code needs less."""
    backward_seconds: float | None = None
    attention_seconds: float | None = None
    budgets: tuple[MemoryBudget, ...] = ()
    """The distinct memory budgets of a compiled layer. Empty if it isn't compiled, or if they aren't known."""
    lean_bytes: int = 0
    """Bytes that the graph of a recomputed layer holds. 0 unless its memory budget is above 0.0."""

    def keeping(self, kept_bytes: int, **changes: Any) -> LayerProfile:
        """This profile with better values. Only large tensors are offloaded: they are taken to be the same share as before."""
        share = min(1.0, self.offloaded_bytes / max(1, self.kept_bytes))
        return dataclasses.replace(self, kept_bytes=kept_bytes, offloaded_bytes=round(share * kept_bytes), **changes)

    def at(self, low: float, high: float) -> LayerProfile:
        """This profile in a step whose kept layers run at the memory budget ``high``, and all others at ``low``."""
        if not self.budgets or self.recompute_seconds is None or self.backward_seconds is None:
            return self
        lean, kept = (max((b for b in self.budgets if b.value <= value), key=lambda b: b.value) for value in (low, high))

        def backward_bytes(budget: MemoryBudget) -> int:
            """Peak of a backward at a budget. All that isn't saved is recomputed before any of it is freed. Kernels write
            results over what was recomputed, but not over what was saved. So budgets that save more than the smallest one,
            attention's results, don't lower the peak further."""
            if budget.value == EVERYTHING.value:
                return self.kept_backward_bytes
            saved_share = min(budget.saved_share, self.budgets[1].saved_share)
            return max(self.kept_backward_bytes, self.recomputed_bytes - round(saved_share * self.kept_bytes))

        kept_bytes = round(kept.saved_share * self.kept_bytes)
        return dataclasses.replace(
            self,
            kept_bytes=kept_bytes,
            offloaded_bytes=round(kept.saved_share * self.offloaded_bytes),
            lean_bytes=round(lean.saved_share * self.kept_bytes),
            kept_forward_bytes=min(self.kept_forward_bytes, self.forward_bytes + kept_bytes),
            kept_backward_bytes=backward_bytes(kept),
            recomputed_bytes=backward_bytes(lean),
            recompute_seconds=(lean.recompute_share - kept.recompute_share) * self.recompute_seconds,
            backward_seconds=self.backward_seconds + kept.recompute_share * self.recompute_seconds,
            budgets=(),
        )

    def of_pieces(self, split: BatchSplit, output_bytes: int) -> LayerProfile:
        """Turns this profile of a batch's first piece into that of the whole batch, which runs piece by piece. The whole call
        returns ``output_bytes``. Gradients of its inputs have as many bytes."""
        if not split.sizes:
            return self
        share = sum(split.sizes) / split.sizes[0]
        costs = {name: getattr(self, name).times(share) for name in ("forward", "backward", "attention", "experts")}
        sizes = ("kept_bytes", "offloaded_bytes", "attention_bytes", "expert_bytes")
        in_proportion: dict[str, Any] = {**costs, **{name: round(share * getattr(self, name)) for name in sizes}}
        in_proportion |= {name: share * taken for name in SECONDS if (taken := getattr(self, name)) is not None}
        kept_bytes = in_proportion["kept_bytes"]
        return dataclasses.replace(
            self,
            # The pieces' outputs are held until they are joined.
            forward_bytes=output_bytes + max(output_bytes, self.forward_bytes),
            kept_forward_bytes=kept_bytes + output_bytes + max(output_bytes, self.kept_forward_bytes - self.kept_bytes),
            kept_backward_bytes=output_bytes + max(output_bytes, self.kept_backward_bytes),
            recomputed_bytes=output_bytes + max(output_bytes, self.recomputed_bytes),
            pieces=split.count,
            piece_share=1 / share,
            **in_proportion,
        )


@dataclasses.dataclass(frozen=True)
class Event:
    """A layer's call or its backward, with what happened outside the layers since the previous event."""

    is_backward: bool
    layer: int
    kind: Hashable
    """Calls of one kind share a profile."""
    live_bytes: int
    """Bytes alive outside when the call begins."""
    peak_bytes: int
    """Peak of bytes alive outside since the previous event."""
    costs: OpCosts
    """Costs of what ran outside since the previous event."""


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """A step on one batch: events in order, peak and costs after the last one, and the profile of each kind of call."""

    events: tuple[Event, ...]
    tail_peak_bytes: int
    tail_costs: OpCosts
    profiles: dict[Hashable, LayerProfile]
    token_tile: int = 0
    """Tokens of a tile in the layers. 0 without tiles."""
    samples: int | None = None
    """Samples of a piece of the batch, if the plan chose that layers run in pieces."""
    outside_seconds: float | None = None
    """Measured time outside the layers, the loss above all, from the step's begin to the first backward of a layer."""
    surely_fits: bool = False
    """Whether states and activations surely fit the device, so that no time was measured."""
    sums_loss: bool = False
    """Whether the model's loss is known to be a sum over tokens divided by ``num_items_in_batch`` (:mod:`.fake_step`)."""

    def at(self, low: float, high: float) -> StepProfile:
        """This step with kept layers at the memory budget ``high`` and all others at ``low``."""
        if (low, high) == (NOTHING.value, EVERYTHING.value):
            return self
        return dataclasses.replace(self, profiles={kind: profile.at(low, high) for kind, profile in self.profiles.items()})

    @property
    def largest_layer_bytes(self) -> int:
        """The largest peak of a recomputed layer's backward."""
        return max((profile.recomputed_bytes for profile in self.profiles.values()), default=0)

    @property
    def forward_calls(self) -> list[Event]:
        return [event for event in self.events if not event.is_backward]

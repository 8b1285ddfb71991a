"""What is known of a training step before it is placed: what a layer's call costs, and what happens around the calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from megatrain_accelerate.layers.compiled_layer import EVERYTHING, NOTHING, MemoryBudget
from megatrain_accelerate.layers.micro_batches import BatchSplit
from megatrain_accelerate.plan.step_memory import OpCosts


@dataclasses.dataclass(frozen=True)
class SavedInForward:
    """What a forward that keeps its graph tells of a compiled one."""

    operand_bytes: int
    """Of what autograd saved besides inputs and weights, what products and attention read or made, and results of softmax."""
    score_bytes: int
    """Of it, results of softmax that products read as they are, padding and all."""
    output_bytes: int
    costs: OpCosts
    """Of the forward until the last tensor was saved."""


SECONDS = {
    **dict.fromkeys(("forward_seconds", "kept_forward_seconds", "recompute_seconds"), "forward"),
    "backward_seconds": "backward",
    "attention_seconds": "attention",
}
"""The measured times of a :class:`LayerProfile`, each with the costs to which it is in proportion."""


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """What one call of a layer costs on the device. Bytes are above what is there when the call begins."""

    forward: OpCosts
    backward: OpCosts
    kept_bytes: int
    """What the graph of a kept layer holds from forward to backward, its inputs and outputs left out."""
    offloaded_bytes: int
    """What of it goes to the host if the layer is offloaded."""
    input_bytes: int
    """What goes to the host of the inputs if those are offloaded."""
    forward_bytes: int
    """The most that is alive in a forward without a graph."""
    kept_forward_bytes: int
    """The most in a forward that keeps its graph."""
    kept_backward_bytes: int
    """The most in a backward, above what was kept; the weights' gradients among it."""
    recomputed_bytes: int
    """The most in a backward that recomputes first."""
    inputs_need_grad: tuple[bool, ...]
    """For each tensor among the arguments."""
    attention: OpCosts = dataclasses.field(default_factory=OpCosts)
    """Of the forward, what attention's kernels cost."""
    attention_bytes: int = 0
    """Of their results."""
    experts: OpCosts = dataclasses.field(default_factory=OpCosts)
    """Of the forward, what experts that stream in parts cost: a recomputed layer keeps their results if its inputs stay."""
    expert_bytes: int = 0
    """Of those."""
    pieces: int = 1
    """In which the batch runs."""
    length: int = 0
    """Tokens of a sequence, as the layer sees them; 0 if its inputs have no such dimension."""
    forward_seconds: float | None = None
    """Measured (:mod:`.layer_measurement`); None: to be estimated from the costs."""
    kept_forward_seconds: float | None = None
    recompute_seconds: float | None = None
    """By how much a backward that recomputes is longer. None: by a forward that keeps its graph; a compiler needs less."""
    backward_seconds: float | None = None
    attention_seconds: float | None = None
    budgets: tuple[MemoryBudget, ...] = ()
    """The distinct memory budgets of a compiled layer; empty if it isn't compiled, or if that isn't known."""
    lean_bytes: int = 0
    """What the graph of a layer holds that isn't kept: nothing but at a memory budget above 0.0."""

    def keeping(self, kept_bytes: int, **changes: Any) -> LayerProfile:
        """This profile with what was found out better. Only large tensors leave: they are the same share of what is kept."""
        share = min(1.0, self.offloaded_bytes / max(1, self.kept_bytes))
        return dataclasses.replace(self, kept_bytes=kept_bytes, offloaded_bytes=round(share * kept_bytes), **changes)

    def at(self, low: float, high: float) -> LayerProfile:
        """This profile for a step in which kept layers run at the budget ``high``, and those that aren't at ``low``."""
        if not self.budgets or self.recompute_seconds is None or self.backward_seconds is None:
            return self
        lean, kept = (max((b for b in self.budgets if b.value <= value), key=lambda b: b.value) for value in (low, high))

        def backward_bytes(budget: MemoryBudget) -> int:
            """What isn't saved is made in backward, before any of it can go."""
            if budget.value == EVERYTHING.value:
                return self.kept_backward_bytes
            return max(self.kept_backward_bytes, self.recomputed_bytes - round(budget.saved_share * self.kept_bytes))

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
        """This profile of the first piece of a batch as that of the whole batch, which runs piece by piece. The whole call
        returns ``output_bytes``; gradients of its inputs are as large."""
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
            # The pieces' outputs wait until they are joined.
            forward_bytes=output_bytes + max(output_bytes, self.forward_bytes),
            kept_forward_bytes=kept_bytes + output_bytes + max(output_bytes, self.kept_forward_bytes - self.kept_bytes),
            kept_backward_bytes=output_bytes + max(output_bytes, self.kept_backward_bytes),
            recomputed_bytes=output_bytes + max(output_bytes, self.recomputed_bytes),
            pieces=split.count,
            **in_proportion,
        )


@dataclasses.dataclass(frozen=True)
class Event:
    """A layer's call or its backward, with what happened outside the layers since the event before."""

    is_backward: bool
    layer: int
    kind: Hashable
    """Calls of one kind have one profile."""
    live_bytes: int
    """Alive outside when the call begins."""
    peak_bytes: int
    """The most alive outside since the event before."""
    costs: OpCosts
    """Of what ran outside since the event before."""


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """A step on one batch: events in order, what follows the last one, and the profile of each kind of call."""

    events: tuple[Event, ...]
    tail_peak_bytes: int
    tail_costs: OpCosts
    profiles: dict[Hashable, LayerProfile]
    token_tile: int = 0
    """Tokens of a tile in the layers; 0 for none."""
    samples: int | None = None
    """Samples of a piece of the batch, where the plan chose that layers run in pieces."""
    outside_seconds: float | None = None
    """Measured: all that runs outside the layers from the step's begin to the first layer's backward, the loss above all."""
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
        """The most that a recomputed layer takes in backward."""
        return max((profile.recomputed_bytes for profile in self.profiles.values()), default=0)

    @property
    def forward_calls(self) -> list[Event]:
        return [event for event in self.events if not event.is_backward]

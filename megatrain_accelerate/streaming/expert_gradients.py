"""Gradients of a layer's experts to the host, part by part, in the slots of the layers' gradients.

A parameter of the experts has one gradient, of which each part brings a range. Those of one backward belong together: whether
they are added to earlier ones is decided before the first, and ``parameter.grad`` shows them behind the last. A part's
ranges lie apart on the host: they are one copy a parameter; what is added to earlier gradients goes to a buffer in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from megatrain_accelerate.streaming.device_slots import GradientSlot
from megatrain_accelerate.streaming.expert_parts import ExpertPart, StreamedExperts
from megatrain_accelerate.streaming.fp32_sums import gradient_norms
from megatrain_accelerate.streaming.gradient_buffers import Addition
from megatrain_accelerate.streaming.meter import Cause
from megatrain_accelerate.streaming.ranges import named_range

if TYPE_CHECKING:
    from megatrain_accelerate.streaming.runtime import StreamingRuntime


class ExpertGradients:
    """The gradients of one layer's experts in one backward.

    Args:
        runtime: the engine at work.
        experts: the layer's.
        is_last: whether no other backward of the same call of the layer follows (of an earlier piece of its batch).

    Raises:
        StateError: the model was prepared for evaluation only, or gradients that pass weren't consumed.
    """

    def __init__(self, runtime: StreamingRuntime, experts: StreamedExperts, is_last: bool) -> None:
        runtime.offloader.require_training(experts)
        self._runtime, self._experts, self._is_last = runtime, experts, is_last
        trainable = experts.trainable
        # One that was frozen since it was prepared gets none.
        self._rows = [row for row, state in enumerate(trainable) if state.parameter.requires_grad]
        self._states = [trainable[row] for row in self._rows]
        is_fresh = len(self._rows) == len(trainable) and all(state.parameter.grad is None for state in trainable)
        self._is_fresh = is_fresh or runtime.offloader.passes
        self._left = len(experts.parts)
        self._norms = torch.zeros(len(trainable), dtype=torch.float32, device=runtime.streams.device)
        self._additions: list[Addition] = []
        if self._is_fresh:
            runtime.offloader.wait_for_addition(experts.unit)
        runtime.offloader.begin_passing(experts)

    def take(self, part: ExpertPart, gradients: Sequence[torch.Tensor | None] | None) -> None:
        """Sends a part's gradients to the host.

        Args:
            part: one of the experts' parts; each is to be given once.
            gradients: one for each parameter that is trained, in entry order; None where nothing flows, or for a part that
                had no token: plain PyTorch's gradient has zeros there.
        """
        runtime, layout = self._runtime, part.unit.layout
        self._left -= 1
        if gradients is None and not self._is_fresh:
            self._show(self._add_on_host(part, None))  # zeros needn't travel
            return
        # WAR: a step that is still to be applied reads the gradients of the pass before.
        runtime.meter.wait_for_step(part.name, part.gate.is_open, part.gate.wait)
        slot = runtime.offloader.take_slot()
        with named_range(f"megatrain::offload_gradients ({part.name})"):
            # WAR: the copy of what used this slot last may still read it.
            runtime.meter.compute_waits_for(slot.grads_copied_event, Cause.D2H)
            views = slot.views(layout)
            for place, row in enumerate(self._rows):
                gradient = None if gradients is None else gradients[place]
                if gradient is None:
                    views[row].zero_()
                else:
                    views[row].copy_(gradient)
            if self._is_fresh:
                self._norms = torch.hypot(self._norms, torch.stack(gradient_norms(views)))
                slot.norms[: len(views)].copy_(self._norms)
            slot.grads_ready_event.record(runtime.streams.compute_stream)
        if not self._is_fresh:
            self._show(self._add_on_host(part, slot))
            return
        unit = self._experts.unit
        assert unit.gradients is not None
        pieces = part.unit.pieces(unit.gradients, slot.buffer, trainable_only=True)
        norms = None if self._left else runtime.norms.of_unit(unit)
        self._show(runtime.offloader.send(slot, part.name, layout.gradient_bytes, pieces, norms).synchronize)

    def _show(self, wait: Callable[[], None]) -> None:
        """Behind the last part ``parameter.grad`` shows the gradients; ``wait`` blocks until they have arrived."""
        if not self._left:
            self._runtime.offloader.show(self._experts, self._states, self._is_fresh, wait, may_be_stepped=self._is_last)

    def _add_on_host(self, part: ExpertPart, slot: GradientSlot | None) -> Callable[[], None]:
        """Adds what the slot holds, or zeros without one; returns what blocks until that is done."""
        runtime, size = self._runtime, part.unit.layout.gradient_bytes
        if not self._additions:
            runtime.offloader.prepare_accumulation()  # before the sums are asked for: it makes their memory
            self._additions = [Addition.of(state, runtime.sums) for state in self._states]
        if not self._left:
            for addition in self._additions:
                addition.note()
        # RAW, WAW: what was sent in an earlier backward may still be on its way to where zeros are added.
        staging, copied_event = None, runtime.offloader.last_copied_event
        views: Sequence[torch.Tensor | None] = [None] * len(self._experts.trainable)
        if slot is not None:
            staging = runtime.offloader.take_staging()
            pieces = [(staging.buffer[:size], slot.buffer[:size])]
            copied_event = runtime.offloader.send(slot, part.name, size, pieces, None)
            views = part.unit.layout.views(staging.buffer, trainable_only=True)
        norms = runtime.norms.of_unit(self._experts.unit)
        takes_norms = not self._left and self._is_last and runtime.offloader.gradients_complete()

        def add() -> None:
            copied_event.synchronize()
            for addition, row in zip(self._additions, self._rows, strict=True):
                addition.add(views[row], runtime.kernels, part.experts.of)
                if takes_norms:
                    total, norms[row] = addition.total_and_norm(runtime.sums)
                    runtime.norms.note(addition.state.parameter, total)

        ticket = runtime.worker.submit(f"accumulate ({part.name})", add)
        if staging is not None:
            staging.ticket = ticket
        runtime.offloader.note_addition(self._experts.unit, ticket)
        return ticket.wait

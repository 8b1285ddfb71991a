"""Gradients to the host: device slots, one copy a layer (of a part of its experts one a parameter, :mod:`.expert_gradients`),
accumulation over micro-batches, and their norms.

The norms are taken on the device, gradient by gradient, while the gradients are still there, and travel with them; so
the global norm is known on the host when backward ends, without another pass over the gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.optim.kernel import HostKernels
from megatrain_accelerate.optim.step_worker import StepWorker, Ticket
from megatrain_accelerate.streaming.device_slots import GradientSlot
from megatrain_accelerate.streaming.fp32_sums import Fp32Sums, gradient_norms
from megatrain_accelerate.streaming.gradient_buffers import Addition, Staging, of_their_own
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.meter import Cause, Meter
from megatrain_accelerate.streaming.norm_table import NormTable
from megatrain_accelerate.streaming.passing_gradients import PassingBuffers, gradient_that_passed, require_stepped
from megatrain_accelerate.streaming.ranges import named_range
from megatrain_accelerate.streaming.streams import Streams


def _refuse_hooked(layer: StreamedLayer, state: ParameterState) -> None:
    """Raises for a gradient hook on a layer's parameter.

    Raises:
        UnsupportedError: it has one.
    """
    if state.parameter._backward_hooks or state.parameter._post_accumulate_grad_hooks:
        raise UnsupportedError(
            f"parameter {layer.name}.{state.name} has a gradient hook (register_hook, register_post_accumulate_grad_hook, "
            "wandb.watch), which a streamed parameter's gradient never passes; remove it, or hook the layer's outputs instead"
        )


class GradientOffloader:
    """Owner of the gradient slots and of the way from a layer's backward to ``parameter.grad`` on the host.

    Args:
        layers: all streamed layers; experts in parts share the slots (:mod:`.expert_gradients`).
        slots: number of gradient slots.
        streams, worker, kernels, meter: the engine's.
        norms: table that gets the norms.
        sums: how gradients of several backwards are added.
        huge_pages, register: of the host buffers, see :class:`HostMemory`.
    """

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        slots: int,
        *,
        streams: Streams,
        worker: StepWorker,
        kernels: HostKernels,
        meter: Meter,
        norms: NormTable,
        sums: Fp32Sums,
        huge_pages: bool,
        register: bool,
    ) -> None:
        self._streams = streams
        self._worker = worker
        self._kernels = kernels
        self._meter = meter
        self._norms = norms
        self._sums = sums
        self._memory_settings = {"huge_pages": huge_pages, "register": register}
        experts = [whole for layer in layers for whole in layer.experts]
        layouts = [layer.unit.layout for layer in layers]
        # Those that pass through the host do so experts by experts, since that is how they are stepped.
        self._largest_unit = max(layout.gradient_bytes for layout in [*layouts, *(whole.unit.layout for whole in experts)])
        layouts += [part.unit.layout for whole in experts for part in whole.parts]
        self._largest = max((layout.gradient_bytes for layout in layouts), default=0)
        self._most_parameters = max((len(layout.trainable_entries) for layout in layouts), default=0)
        self._slot_count = slots if self._largest else 0
        self.slots: list[GradientSlot] = []
        self._takes_gradients = False
        self._next_slot = 0
        self._staging: list[Staging] = []
        self._next_staging = 0
        self._last_copied_event = streams.event()
        self._additions: dict[int, Ticket] = {}
        self._in_flight: list[torch.Tensor] = []
        self.gradients_complete: Callable[[], bool] = lambda: True
        """Whether the backward in progress is the last before a step; norms are needed only then."""
        self._passing: PassingBuffers | None = None
        self.layer_done_listeners: dict[int, Callable[[StreamedLayer, Callable[[], None]], bool]] = {}
        """Called with a layer and a function that blocks until its gradients are on the host; entered by optimizers whose
        steps may run in backward, by their id. Tells whether the layer was stepped."""

    def allocate_slots(self, needed: bool = True, passes: bool = False) -> None:
        """Gets ready for gradients; a run that only evaluates needn't.

        Args:
            needed: whether any layer's gradients leave the device; else slots that there are are given back.
            passes: make the buffers through which gradients pass, see ``passing_gradients.py``.
        """
        self._takes_gradients = True
        if passes and self._passing is None and self._largest:
            self._passing = PassingBuffers(self._largest_unit, meter=self._meter, **self._memory_settings)
        if not needed:
            self.slots, self._next_slot = [], 0
        elif not self.slots:
            self.slots = [GradientSlot(self._largest, self._most_parameters, self._streams) for _ in range(self._slot_count)]

    @property
    def takes_gradients(self) -> bool:
        """Whether the run trains."""
        return self._takes_gradients

    def require_training(self, layer: StreamedLayer) -> None:
        """Raises where a layer, or its experts, got a gradient that nobody takes.

        Raises:
            StateError: the model was prepared for evaluation only.
        """
        if not self._takes_gradients:
            raise StateError(
                f"{layer.kind} {layer.name} got a gradient but the model was prepared for evaluation only; prepare it with "
                "accelerator.prepare(model) (evaluation_mode=False) to train it"
            )

    @property
    def slot_bytes(self) -> int:
        """Bytes of the gradient slots, where any layer needs them."""
        return self._slot_count * self._largest

    @property
    def device_bytes(self) -> int:
        """Bytes of the gradient slots that there are."""
        return sum(slot.buffer.numel() for slot in self.slots)

    @property
    def passing_bytes(self) -> int:
        """Bytes of the host buffers through which gradients pass."""
        return 0 if self._passing is None else self._passing.size_bytes

    def offload(self, layer: StreamedLayer, gradients: Sequence[torch.Tensor | None]) -> None:
        """Sends a layer's gradients to the host and sets or adds to ``parameter.grad`` there.

        Args:
            layer: the layer whose backward made them.
            gradients: one per trainable entry, in entry order; None where the parameter had no part in the loss.
        """
        unit = layer.unit
        trainable = layer.trainable
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        arrived = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return
        self.require_training(layer)
        if unit.is_on_device:
            self._leave_on_device(layer, [trainable[i] for i in present], arrived)
            return
        # WAR: a step that is still to be applied reads the gradients of the pass before.
        self._meter.wait_for_step(layer.name, layer.gate.is_open, layer.gate.wait)
        slot = self.take_slot()
        with named_range(f"megatrain::offload_gradients ({layer.name})"):
            # WAR: the copy of the layer that used this slot last may still read it.
            self._meter.compute_waits_for(slot.grads_copied_event, Cause.D2H)
            views = slot.views(unit.layout)
            torch._foreach_copy_([views[i] for i in present], arrived)
            # All of them, and nothing to add to: they go straight to their place, with their norms. So do those that pass.
            added_to = [state for state in trainable if state.parameter.grad is not None]
            is_fresh = self.passes or (len(present) == len(trainable) and not added_to)
            if is_fresh:
                slot.norms[: len(trainable)].copy_(torch.stack(gradient_norms(views)))
            slot.grads_ready_event.record(self._streams.compute_stream)
        self.begin_passing(layer)
        if is_fresh:
            assert unit.gradients is not None
            self.wait_for_addition(unit)
            wait = self._copy_out(slot, layer, unit.gradients, self._norms.of_unit(unit)).synchronize
        else:
            ticket = self._add_on_host(slot, layer, [trainable[i] for i in present], present)
            self.note_addition(unit, ticket)
            wait = ticket.wait
        self.show(layer, [trainable[i] for i in present], is_fresh, wait)

    def take_slot(self) -> GradientSlot:
        """The next slot; the compute stream must wait for its ``grads_copied_event`` before it is written."""
        slot = self.slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % len(self.slots)
        return slot

    @property
    def last_copied_event(self) -> Any:
        """Complete when all gradients that were sent so far have arrived."""
        return self._last_copied_event

    @property
    def passes(self) -> bool:
        """Whether gradients are consumed in backward."""
        return self._passing is not None

    def begin_passing(self, layer: StreamedLayer) -> None:
        """Where gradients pass, the layer's unit gets a buffer for them."""
        if self._passing is not None:
            layer.unit.gradients = self._passing.take(layer)

    def note_addition(self, unit: HostUnit, ticket: Ticket) -> None:
        """The worker's last addition to this unit's gradients: :meth:`wait` waits for it."""
        self._additions[id(unit)] = ticket

    def wait_for_addition(self, unit: HostUnit) -> None:
        """Before new gradients take their place: WAW, an addition to dropped ones may still be queued."""
        if (ticket := self._additions.pop(id(unit), None)) is not None:
            ticket.wait()

    def show(
        self,
        layer: StreamedLayer,
        states: list[ParameterState],
        is_fresh: bool,
        wait: Callable[[], None],
        may_be_stepped: bool = True,
    ) -> None:
        """A layer's gradients are on their way: ``parameter.grad`` is the host's view, and steps in backward may begin.

        Args:
            layer: the layer.
            states: its parameters that got a gradient.
            is_fresh: whether there was nothing to add to, so that their norms come along; else those of the sums do with the
                last before a step.
            wait: blocks until they have arrived.
            may_be_stepped: whether this backward of the layer brings no others.
        """
        for state in states:
            _refuse_hooked(layer, state)
            gradient = state.parameter.grad
            if gradient is None:
                gradient = gradient_that_passed(state) if state.gradient is None else state.gradient
                state.handle.set_gradient(gradient)
            if is_fresh or (may_be_stepped and self.gradients_complete()):
                self._norms.note(state.parameter, gradient)
            else:
                self._norms.forget(state.parameter)
        if not may_be_stepped:
            return
        stepped = [listener(layer, wait) for listener in self.layer_done_listeners.values()]
        if self._passing is not None:
            require_stepped(layer, stepped)

    def _leave_on_device(self, layer: StreamedLayer, states: list[ParameterState], gradients: list[torch.Tensor]) -> None:
        """Gradients of a unit on the device stay where they are; their norms go to the host."""
        for state, gradient in zip(states, of_their_own(gradients), strict=True):
            _refuse_hooked(layer, state)
            self.add_in_place(state, gradient)
            self._norms.forget(state.parameter)
        if not self.gradients_complete():
            return
        norms = torch.stack(self._sums.norms(states))
        ready_event = self._streams.event()
        ready_event.record(self._streams.compute_stream)
        d2h_stream = self._streams.d2h_stream
        table = self._norms.of_unit(layer.unit)
        rows = [row for row, entry in enumerate(layer.unit.layout.trainable_entries) if entry in {s.entry for s in states}]
        with self._streams.on(d2h_stream):
            # RAW: the norms must be finished.
            d2h_stream.wait_event(ready_event)
            if len(rows) == table.numel():
                table.copy_(norms, non_blocking=True)
            else:
                for row, norm in zip(rows, norms.unbind(), strict=True):
                    table[row].copy_(norm, non_blocking=True)
            self._last_copied_event = self._streams.event()
            self._last_copied_event.record(d2h_stream)
        # The allocator may hand out their memory again while the copy runs.
        self._in_flight.append(norms)
        for state in states:
            assert state.parameter.grad is not None
            self._norms.note(state.parameter, state.parameter.grad)

    def add_in_place(self, state: ParameterState, gradient: torch.Tensor) -> None:
        """Sets or adds to a gradient that no copy is on its way to, where the parameter lies."""
        if state.parameter.grad is None:
            state.handle.set_gradient(gradient)
            return
        self._sums.prepare()
        running = self._sums.running(state)
        if running is None:
            state.parameter.grad.add_(gradient)
        else:
            running.add(gradient)
            state.handle.note_fp32_sum()

    def _copy_out(self, slot: GradientSlot, layer: StreamedLayer, target: torch.Tensor, norms: torch.Tensor | None) -> Any:
        size = layer.unit.layout.gradient_bytes
        return self.send(slot, layer.name, size, [(target[:size], slot.buffer[:size])], norms)

    def send(
        self, slot: GradientSlot, name: str, size: int, pieces: Sequence[tuple[torch.Tensor, ...]], norms: torch.Tensor | None
    ) -> Any:
        """Issues the copies of a slot's gradients; returns an event of its own, since the slot's may be recorded again before
        it is waited for.

        Args:
            slot: the slot.
            name: whose gradients they are.
            size: bytes of all of them.
            pieces: views of the host's memory, and those of the slot's that go there.
            norms: where the slot's norms go; None if they stay.
        """
        d2h_stream = self._streams.d2h_stream
        with self._streams.on(d2h_stream), named_range(f"megatrain::copy_gradients ({name})"):
            # RAW: the copy must see the finished gradients.
            d2h_stream.wait_event(slot.grads_ready_event)
            with self._meter.copying(Cause.D2H, size):
                for target, source in pieces:
                    target.copy_(source, non_blocking=True)
            if norms is not None:
                norms.copy_(slot.norms[: norms.numel()], non_blocking=True)
            slot.grads_copied_event.record(d2h_stream)
            self._last_copied_event = self._streams.event()
            self._last_copied_event.record(d2h_stream)
        self._meter.counters.d2h_bytes += size
        return self._last_copied_event

    def _add_on_host(self, slot: GradientSlot, layer: StreamedLayer, states: list[ParameterState], rows: list[int]) -> Ticket:
        staging = self.take_staging()
        copied_event = self._copy_out(slot, layer, staging.buffer, None)
        views = layer.unit.layout.views(staging.buffer, trainable_only=True)
        additions = [Addition.of(state, self._sums) for state in states]
        for addition in additions:
            addition.note()
        norms = self._norms.of_unit(layer.unit)
        is_last = self.gradients_complete()

        def add() -> None:
            copied_event.synchronize()
            for addition, row in zip(additions, rows, strict=True):
                addition.add(views[row], self._kernels)
                if is_last:
                    total, norms[row] = addition.total_and_norm(self._sums)
                    self._norms.note(addition.state.parameter, total)

        staging.ticket = self._worker.submit(f"accumulate ({layer.name})", add)
        return staging.ticket

    def take_staging(self) -> Staging:
        """A host buffer for gradients that are to be added to earlier ones; waits until it is free."""
        self.prepare_accumulation()
        staging = self._staging[self._next_staging]
        self._next_staging = (self._next_staging + 1) % len(self._staging)
        if staging.ticket is not None and not staging.ticket.is_done:
            start = time.perf_counter()
            with self._meter.blocked_by(Cause.HOST_STEP):
                staging.ticket.wait()
            self._meter.counters.optimizer_wait_ms += 1e3 * (time.perf_counter() - start)
        return staging

    def prepare_accumulation(self) -> None:
        """Allocates staging buffers and fp32 sums, so that none is made within a step. Does nothing when they exist.

        Raises:
            HostMemoryError: the sums don't fit.
        """
        self._sums.prepare(0 if self._staging else 2 * self._largest)
        if not self._staging and self._largest:
            self._staging = [Staging(self._largest, **self._memory_settings) for _ in range(2)]

    def wait(self) -> None:
        """Blocks until every gradient is on the host and added up.

        Raises:
            StepWorkerError: adding failed.
        """
        self._last_copied_event.synchronize()
        self._in_flight = []
        for ticket in self._additions.values():
            ticket.wait()
        self._additions.clear()

    def close(self) -> None:
        """Unregisters the staging buffers."""
        for staging in self._staging:
            staging.memory.close()
        if self._passing is not None:
            self._passing.close()

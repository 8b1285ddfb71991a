"""Offloads gradients to the host: device slots, one copy a layer, accumulation over micro-batches, norms. The norm of each
gradient is taken while it is on the device, and copied with it, so that the global norm is known on the host when backward
ends. If no layer streams, gradients stay on the device; then norms are copied when backward ends, and clipping or the step
waits for them. With ``host_gradients: passing`` gradients of layers *pass*: they go through a few host buffers that they share
(:mod:`.buffers`), and the layers are stepped in backward."""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.gradients.buffers import Addition, HostBuffers, not_stepped, of_their_own
from megatrain_accelerate.gradients.clipping import NormTable
from megatrain_accelerate.gradients.exchange import Exchange
from megatrain_accelerate.gradients.fp32_sums import Fp32Sums, gradient_norms
from megatrain_accelerate.store.layout import FlatLayout
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.shared_store import SharedStore
from megatrain_accelerate.store.step_worker import Future, StepWorker
from megatrain_accelerate.store.unit import PASSING_BUFFERS, HostUnit
from megatrain_accelerate.transfer.meter import Cause, Meter, UpdateGate, named_range
from megatrain_accelerate.transfer.parts import Fetched, Stepped, Streamed
from megatrain_accelerate.transfer.streams import GradientSlot

Copies = Sequence[tuple[torch.Tensor, ...]]
"""Pairs of a host tensor and the device tensor that is to be copied there."""
GRADIENT_SLOTS = 2
"""Device buffers for one layer's gradients each: one is written while the other is copied to the host."""
_STAGING_BUFFERS = 2


class UnitStepper:
    """Base class of what steps a model's parameters (the runtime's ``steppers``), with what the runtime uses of it. By default
    a stepper steps within ``optimizer.step()``, on the host."""

    schedule = "serial"
    """When the arithmetic runs: ``serial`` within ``step()``, ``deferred`` after it, ``backward`` in backward."""

    needs_states_on_host = True
    """Whether it steps on the host alone, so that no unit's states may live on the device."""

    def layer_done(self, layer: Streamed, wait: Callable[[], None]) -> bool:
        """Called in backward when a layer's gradients are in flight to the host. ``wait`` blocks until they have arrived.
        Returns whether the stepper steps the layer now. If not, ``optimizer.step()`` does."""
        return False


class GradientOffloader:
    """Owner of the gradient slots. Takes gradients from a backward to ``parameter.grad`` on the host. ``layers``, ``experts``
    and ``parts`` are layouts: of the layers, of each layer's experts if these stream in parts, and of the parts. Gradients of
    a layer or a part go through a slot as a whole. ``passes``: whether gradients of layers pass."""

    def __init__(
        self,
        layers: Sequence[FlatLayout],
        experts: Sequence[FlatLayout],
        parts: Sequence[FlatLayout],
        worker: StepWorker,
        meter: Meter,
        norms: NormTable,
        sums: Fp32Sums,
        *,
        passes: bool,
        shared: SharedStore | None = None,
    ) -> None:
        self.streams, self.worker, self.meter, self.norms, self.sums = meter.streams, worker, meter, norms, sums
        self.steppers: list[UnitStepper] = []
        # A buffer for gradients that pass holds those of a whole unit, since units are stepped whole in backward.
        self._most_unit_bytes = max(layout.gradient_bytes for layout in (*layers, *experts))
        self._most_slot_bytes = max(layout.gradient_bytes for layout in (*layers, *parts))
        self.slot_bytes, self.staging_bytes = GRADIENT_SLOTS * self._most_slot_bytes, _STAGING_BUFFERS * self._most_slot_bytes
        """Bytes of the slots, and of the host buffers where gradients wait to be added to earlier ones, allocated or not."""
        self._most_parameters = max(len(layout.trainable_entries) for layout in (*layers, *parts))
        self._may_pass = passes and self._most_slot_bytes > 0
        self.exchange = None if shared is None else Exchange(shared, meter.streams, layers)
        """Makes the means of several ranks' gradients. None with one process."""
        self.slots: collections.deque[GradientSlot] = collections.deque()
        """The slots in the order in which they are written next. Empty unless a layer's gradients are offloaded."""
        self.takes_gradients = False
        """Whether the run trains."""
        self._staging: HostBuffers | None = None
        self.last_copied_event = self.streams.event()
        """Complete when all gradients that were sent so far have arrived."""
        self.additions: dict[int, Future] = {}
        """The worker's last addition to each unit's gradients, by ``id`` of the unit."""
        self._in_flight: list[torch.Tensor] = []
        self.is_last_backward: Callable[[], bool] = lambda: True
        """Whether this backward is the last before a step (Accelerate's gradient state). Norms are needed only then."""
        self.passing_buffers: HostBuffers | None = None
        """Host buffers for gradients that pass. Allocated by the first :meth:`allocate_gradients`."""

    @property
    def passes_gradients(self) -> bool:
        """Whether gradients of layers pass: they are consumed in backward, and have no host memory of their own."""
        return self._may_pass and self.takes_gradients

    @property
    def promised_bytes(self) -> int:
        """Bytes of :attr:`passing_buffers` while they are needed and not yet allocated, see :meth:`HostUnit.promise`."""
        is_needed = self.passes_gradients and self.passing_buffers is None and self.slots
        return PASSING_BUFFERS * self._most_unit_bytes if is_needed else 0

    def allocate_gradients(self, units: Iterable[HostUnit]) -> None:
        """Allocates missing host memory for the gradients of those of these units that live on the host."""
        for unit in units:
            unit.allocate("gradients")
        if self.promised_bytes:
            self.passing_buffers = HostBuffers(PASSING_BUFFERS, self._most_unit_bytes, self.meter)

    def allocate_slots(self, needed: bool = True) -> None:
        """Prepares for training. Slots are ``needed`` if any layer's gradients are offloaded. If not, they are freed."""
        self.takes_gradients = True
        if not needed:
            self.slots.clear()
        elif not self.slots and self._most_slot_bytes:
            sizes = self._most_slot_bytes, self._most_parameters
            self.slots.extend(GradientSlot(*sizes, self.streams) for _ in range(GRADIENT_SLOTS))

    def begin(
        self, layer: Streamed, found: Container[int] | None = None, parts: int = 1, is_last: bool = True
    ) -> UnitGradients | None:
        """Returns what takes the gradients of one backward of a layer, or None if no parameter gets one. ``found``: which of
        its trainable parameters got one, by index (None: all). ``parts``, ``is_last``: see :class:`UnitGradients`. Raises a
        StateError if the model was prepared for evaluation only, and an UnsupportedError for gradient hooks."""
        # A parameter that was frozen since the forward takes no gradient.
        trained = [row for row, state in enumerate(layer.trainable) if state.parameter.requires_grad]
        rows = [row for row in trained if found is None or row in found]
        if self.exchange is not None:
            self.exchange.note_found((layer.trainable[row] for row in rows), among=layer.trainable)
            rows = trained  # another rank may have a gradient where this one has none, and contributes zeros
        if rows and not self.takes_gradients:
            raise StateError(
                f"{layer.kind} {layer.name} got a gradient but the model was prepared for evaluation only; prepare it with "
                "accelerator.prepare(model) (evaluation_mode=False) to train it"
            )
        if not rows:
            return None
        if layer.unit.gradients is None:
            self.allocate_gradients([layer.unit])  # the layer was called by itself: a forward of the model would have done so
        taken = UnitGradients(self, layer, rows, parts, is_last)
        for state in taken.states:
            if state.parameter._backward_hooks or state.parameter._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"{layer.name}.{state.name} has a gradient hook (register_hook, register_post_accumulate_grad_hook, "
                    "wandb.watch), which a streamed parameter's gradient never passes; remove it, or hook the layer's outputs"
                )
        return taken

    @property
    def device_bytes(self) -> int:
        return sum(slot.buffer.numel() for slot in self.slots)

    def offload(self, layer: Streamed, found: dict[int, torch.Tensor]) -> None:
        """Brings the gradients ``found``, by index among a layer's trainable parameters, to ``parameter.grad``. Where ranks
        exchange gradients of a layer on the device, missing ones are added to ``found``, as zeros."""
        taken = self.begin(layer, found)
        if taken is None:
            return
        if not layer.unit.is_on_device:
            taken.take(layer, [found.get(row) for row in taken.rows])
            return
        # The gradients of a layer on the device stay there. Only their norms are copied to the host.
        if self.exchange is not None:
            found |= {row: torch.zeros_like(layer.trainable[row].weight) for row in taken.rows if row not in found}
        gradients = of_their_own([found[row] for row in taken.rows])
        if self.exchange is not None:
            self.exchange.make_means(gradients, layer.name)
            if any(state.parameter.grad is not None for state in taken.states):
                self.exchange.wait_for_means()  # RAW: they are added to earlier ones
        for state, gradient in zip(taken.states, gradients, strict=True):
            self.sums.add(state, gradient)
        if self.is_last_backward() and self.exchange is None:
            self.send_from_device(layer.name, taken.states)

    def fetch(self, group: Stepped, states: Iterable[ParameterState]) -> None:
        """Copies a group's gradients to the host that aren't there yet. Of a unit on the device it copies norms only."""
        for state in states:
            parameter = state.parameter
            if state.row is None or parameter.grad is None or state.has_norm:  # the gradient was sent with its norm
                continue
            # WAR: a step that isn't applied yet reads the last gradients.
            self.meter.wait_for_step(group.name, group.gate)
            self.allocate_gradients([group.unit])
            copies = [] if state.gradient is None else [(state.gradient, parameter.grad)]
            residual = state.gradient_residual
            if copies and state.handle.has_fp32_sum and residual is not None and state.sum_residual is not None:
                copies.append((residual, state.sum_residual))
            own, entry = group.unit.own_elements, state.entry
            copies = [(own(entry, target), own(entry, source)) for target, source in copies]
            self.send_from_device(group.name, [state], copies)

    def send_from_device(self, name: str, states: list[ParameterState], copies: Copies = ()) -> None:
        """Copies the norms of gradients on the device to the host, and makes ``copies`` of the gradients, if any are given."""
        if not states:
            return
        norms = torch.stack(self.sums.norms(states))
        if self.last_copied_event.query():
            self._in_flight = []
        ready_event = self.streams.event()
        ready_event.record(self.streams.compute_stream)
        self.send(name, ready_event, copies, self.norms.copies(states, norms))
        # The sources are kept alive: the allocator could hand out their memory while the copies run.
        self._in_flight += [norms, *(source for _, source in copies)]
        for state in states:
            assert state.parameter.grad is not None
            state.note_norm(state.parameter.grad)

    def send(self, name: str, ready_event: Any, copies: Copies, norms: Copies) -> Any:
        """Issues copies of gradients and norms to the host, behind ``ready_event``. Returns an event behind the copies."""
        d2h_stream = self.streams.d2h_stream
        with self.streams.on(d2h_stream), named_range(f"megatrain::copy_gradients ({name})"):
            # RAW: gradients and norms must be finished.
            d2h_stream.wait_event(ready_event)
            with self.meter.copying(Cause.D2H, sum(target.nbytes for target, _ in copies)):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
            for target, source in norms:
                target.copy_(source, non_blocking=True)
            self.last_copied_event = self.streams.event()
            self.last_copied_event.record(d2h_stream)
        return self.last_copied_event

    def prepare_accumulation(self) -> HostBuffers | None:
        """Allocates fp32 sums and staging buffers once, and returns the buffers. A HostMemoryError if the sums don't fit."""
        self.sums.prepare(0 if self._staging is not None else self.staging_bytes)
        if self._staging is None and self._most_slot_bytes:
            self._staging = HostBuffers(_STAGING_BUFFERS, self._most_slot_bytes, self.meter)
        return self._staging

    def wait(self) -> None:
        """Blocks until every gradient is on the host and added up. Raises if an addition failed."""
        self.last_copied_event.synchronize()
        self._in_flight = []
        for future in self.additions.values():
            future.wait()
        self.additions.clear()

    def close(self) -> None:
        for buffers in (self._staging, self.passing_buffers):
            if buffers is not None:
                buffers.close()
        if self.exchange is not None:
            self.exchange.close()


class UnitGradients:
    """Takes the gradients of one backward to the host. :meth:`take` is called once for a layer, or ``parts`` times for experts
    that stream in parts, each of which brings a range of every parameter's gradient. Whether these are added to earlier
    gradients is decided before the first call, and ``parameter.grad`` is set after the last. A layer is one copy, a part one
    for each parameter. ``rows``: which of the layer's trainable parameters get a gradient, by index. ``is_last``: no other
    backward of the layer's call follows. Experts have one for each piece of the batch, and each time they are called."""

    def __init__(self, offloader: GradientOffloader, layer: Streamed, rows: list[int], parts: int, is_last: bool) -> None:
        self.rows, self._offloader, self._layer, self._is_last = rows, offloader, layer, is_last
        self.states = [layer.trainable[row] for row in rows]
        # Fresh: all trained parameters get a gradient, and none has one yet. They are copied straight to the unit's gradients,
        # with norms, and otherwise added on the host. Gradients that pass are never added.
        is_fresh = len(rows) == len(layer.trainable) and not [s for s in layer.trainable if s.parameter.grad is not None]
        self._is_fresh = is_fresh or offloader.passes_gradients
        self._parts_left = parts
        self._target: torch.Tensor | None = None
        """The unit's host memory for fresh gradients. None before the first part is copied there."""
        self._norms_so_far: torch.Tensor | None = None
        self._additions: list[Addition] = []

    def take(self, part: Fetched, gradients: Sequence[torch.Tensor | None] | None) -> None:
        """Takes the gradients of the layer, or of a part of its experts: one for each row, None for a row without one.
        ``gradients`` is None for a part without tokens, where plain PyTorch has zeros."""
        offloader, layout = self._offloader, part.unit.layout
        self._parts_left -= 1
        if gradients is None and not self._is_fresh and offloader.exchange is None:
            self._show(self._add_on_host(part, None))  # no other rank has gradients to add: zeros needn't be copied
            return
        # WAR: a step that isn't applied yet reads the last gradients.
        offloader.meter.wait_for_step(part.name, part.gate)
        slot = offloader.slots[0]
        offloader.slots.rotate(-1)
        with named_range(f"megatrain::offload_gradients ({part.name})"):
            # WAR: the last copy from this slot may still read it.
            offloader.meter.compute_waits_for(slot.grads_copied_event, Cause.D2H)
            views = slot.views(layout)
            arrived = dict(zip(self.rows, gradients or [None] * len(self.rows), strict=True))
            if missing := [views[row] for row, gradient in arrived.items() if gradient is None]:
                torch._foreach_zero_(missing)
            if found := {row: gradient for row, gradient in arrived.items() if gradient is not None}:
                torch._foreach_copy_([views[row] for row in found], list(found.values()))
            if offloader.exchange is None:
                self._take_norms(slot, views)
            slot.grads_ready_event.record(offloader.streams.compute_stream)
        if (exchange := offloader.exchange) is not None:
            # This rank's share becomes the mean over all ranks. Norms are taken of that mean.
            d2h_stream, whole = offloader.streams.d2h_stream, self._layer.unit.layout
            with offloader.streams.on(d2h_stream), named_range(f"megatrain::exchange_gradients ({part.name})"):
                # RAW: the other ranks must see finished gradients.
                d2h_stream.wait_event(slot.grads_ready_event)
                exchange.mean_of_share(slot.buffer, whole, part.unit.gradient_runs, part.name)
                entries = zip(whole.trainable_entries, views, strict=True)
                self._take_norms(slot, [part.unit.own_elements_in_slot(entry, view) for entry, view in entries])
        self._show(self._copy_to_unit(part, slot) if self._is_fresh else self._add_on_host(part, slot))

    def _take_norms(self, slot: GradientSlot, gradients: Sequence[torch.Tensor]) -> None:
        """Writes the norms of fresh gradients to the slot: as a part brings a range, those of all ranges so far."""
        if not self._is_fresh:
            return
        norms = slot.norms[: len(gradients)]
        torch.stack(gradient_norms(gradients), out=norms)
        if self._norms_so_far is not None:
            torch.hypot(self._norms_so_far, norms, out=norms)  # squares of the ranges' norms add up
        if self._parts_left:
            self._norms_so_far = norms.clone()

    def _show(self, wait: Callable[[], None]) -> None:
        """After the last part: sets ``parameter.grad`` to the tensor on the host, and lets steps in backward begin. ``wait``
        blocks until all gradients have arrived. Raises a StateError if gradients pass and no stepper steps the layer."""
        if self._parts_left:
            return
        offloader = self._offloader
        # Fresh gradients come with norms. The norms of sums are taken in the last backward before a step.
        has_norms = self._is_fresh or (self._is_last and offloader.is_last_backward())
        for state in self.states:
            gradient = state.parameter.grad
            if gradient is None:
                # A gradient that passes is shown as not-a-number, in the memory of one element.
                spec, on_host = state.entry.spec, state.gradient
                gradient = torch.full((), torch.nan, dtype=spec.dtype).expand(spec.shape) if on_host is None else on_host
                state.handle.set_gradient(gradient)
            if has_norms:
                state.note_norm(gradient)
                if offloader.exchange is not None:
                    offloader.exchange.rows_of_shares.add(state.row)
            else:
                state.normed = None
        if self._is_last:
            stepped = [stepper.layer_done(self._layer, wait) for stepper in offloader.steppers]
            if offloader.passes_gradients and not any(stepped):
                raise not_stepped(self._layer)

    def _copy_to_unit(self, part: Fetched, slot: GradientSlot) -> Any:
        """Issues the copy from the slot to the unit's gradients. Returns a function that blocks until they have arrived."""
        offloader, unit = self._offloader, self._layer.unit
        if self._target is None:
            if offloader.passing_buffers is not None:
                if any(state.parameter.grad is not None for state in unit.states):
                    raise not_stepped(self._layer)
                unit.gradients = offloader.passing_buffers.take(self._layer.gate)
            if (future := offloader.additions.pop(id(unit), None)) is not None:
                future.wait()  # WAW: an addition to dropped gradients may be queued
            assert unit.gradients is not None
            self._target = unit.gradients
        runs = part.unit.own_gradients
        copies = [(self._target[run.in_unit], slot.bytes_of(run.in_slot.start, run.in_slot.stop)) for run in runs]
        trainable = self._layer.trainable
        norm_copies = [] if self._parts_left else offloader.norms.copies(trainable, slot.norms[: len(trainable)])
        slot.grads_copied_event = offloader.send(part.name, slot.grads_ready_event, copies, norm_copies)
        return slot.grads_copied_event.synchronize

    def _add_on_host(self, part: Fetched, slot: GradientSlot | None) -> Callable[[], None]:
        """Queues the addition of the slot's gradients (without a slot: zeros). Returns a function that waits for it."""
        offloader, unit = self._offloader, self._layer.unit
        buffers = offloader.prepare_accumulation()  # allocates the fp32 sums, too
        staging_free = UpdateGate()
        # RAW, WAW: gradients of an earlier backward may still be in flight to where zeros are added.
        copied_event = offloader.last_copied_event
        views: Sequence[torch.Tensor | None] = [None] * len(self._layer.trainable)
        if slot is not None:
            assert buffers is not None
            staging = buffers.take(staging_free)
            ranges = [run.in_slot for run in part.unit.own_gradients]
            copies = [(staging[at], slot.bytes_of(at.start, at.stop)) for at in ranges]
            slot.grads_copied_event = copied_event = offloader.send(part.name, slot.grads_ready_event, copies, ())
            staged = zip(unit.layout.trainable_entries, part.unit.layout.views(staging, trainable_only=True), strict=True)
            views = [part.unit.own_elements_in_slot(entry, view) for entry, view in staged]
        if not self._additions:
            self._additions = [Addition(s, s.parameter.grad, offloader.sums.running(s)) for s in self.states]
        completed: Sequence[Addition] = () if self._parts_left else self._additions
        for addition in completed:
            if addition.running is not None:
                addition.state.handle.note_fp32_sum()  # of which ``parameter.grad`` has the upper 16 bits
        takes_norms = not self._parts_left and self._is_last and offloader.is_last_backward()

        def add() -> None:
            copied_event.synchronize()
            for addition, row in zip(self._additions, self.rows, strict=True):
                addition.add(views[row], offloader.sums, part.unit.own_elements)
                if takes_norms:
                    total, offloader.norms.norms[addition.state.row] = addition.total_and_norm(offloader.sums, unit)
                    addition.state.note_norm(total)  # again: the addition may have moved its version

        future = offloader.worker.submit(f"accumulate ({part.name})", add)
        staging_free.close_until(future)
        offloader.additions[id(unit)] = future
        return future.wait

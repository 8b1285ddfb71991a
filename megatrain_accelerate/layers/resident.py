"""Resident groups: parameters outside the layers (embeddings, final norm, head), whose weights stay on the device. Masters and
moments live on the host, as those of layers do, unless the plan moves the whole unit to the device. Autograd accumulates their
gradients on the device, from where they are copied to the host before the step."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.watched_parameters import unwatched
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.gather import Gather
from megatrain_accelerate.transfer.meter import Cause, Meter, UpdateGate, named_range
from megatrain_accelerate.transfer.streams import Streams


class ResidentGroup:
    """One module's own parameters outside all layers, behind ``layers_before`` of these. After each step its weights on the
    device are copied from the unit's on the host, or gathered if several ranks have each stepped a share on a device."""

    def __init__(self, name: str, unit: HostUnit, layers_before: int, *, streams: Streams, meter: Meter) -> None:
        self.name, self.unit, self.layers_before = name, unit, layers_before
        self.gate = UpdateGate()
        unit.sums_device = streams.device
        self._streams, self._meter = streams, meter
        self._params_copied_event = streams.event()
        self._device_weights: list[torch.Tensor] = []
        """The weights on the device, in entry order."""
        self._buffer: torch.Tensor | None = None
        """The flat memory of these, for a group on the host that several ranks share; else None."""
        self._is_stale = False
        """Whether this rank's weights on the device are older than the last step."""
        self._is_ungathered = False
        """Whether the ranks have yet to gather the weights of the last step. A rank that has copied them from the host since
        must take part all the same."""
        self._readers_finished: Any = None
        """Event behind the kernels that read the weights of before the step, recorded when the step was taken."""
        self.show_device_weights()

    def show_device_weights(self) -> None:
        """Puts the parameters' data and gradients on the device, where they compute. Also called when the unit has moved."""
        on_device = self.unit.is_on_device
        self._is_stale = self._is_ungathered = False
        own = None, [state.weight for state in self.unit.states]
        # Copies even where the device is the CPU: there, too, a step mustn't write to the memory that computes.
        self._buffer, self._device_weights = own if on_device else self.unit.weights_on(self._streams.device)
        for state, weight in zip(self.unit.states, self._device_weights, strict=True):
            is_sum, gradient = state.handle.has_fp32_sum, state.parameter.grad
            state.handle.set_gradient(None)
            state.handle.show(weight)
            state.handle.set_gradient(None if gradient is None else gradient.to(self._streams.device, copy=not on_device))
            if is_sum:
                state.handle.note_fp32_sum()

    @property
    def device_bytes(self) -> int:
        return sum(state.parameter.nbytes for state in self.unit.states)

    def wait_for_step(self) -> None:
        """Makes kernels that are issued afterwards read the stepped weights. Raises if the step failed."""
        start = time.perf_counter()
        self._meter.wait_for_step(self.name, self.gate)
        if self._is_stale:
            with unwatched():
                self.push_weights(self.announce_push())
        if self._params_copied_event.query():
            return
        late_ms = 1e3 * (time.perf_counter() - start)
        # RAW: the copy of the stepped weights must be over.
        self._meter.compute_waits_for(self._params_copied_event, Cause.H2D, late_ms)

    def announce_push(self) -> Any:
        """Called when a step is taken: counts its copies. Returns the event for :meth:`push_weights`."""
        self._meter.counters.h2d_bytes += self.device_bytes
        return self._readers_finished_event()

    def _readers_finished_event(self) -> Any:
        self.unit.page_lock_weights()
        event = self._streams.event()
        event.record(self._streams.compute_stream)
        return event

    def note_ungathered(self) -> None:
        """Called instead of :meth:`announce_push` if ranks step shares on their devices: each has a part of the weights."""
        self._is_stale = self._is_ungathered = True
        self._readers_finished = self._readers_finished_event()

    def gather(self, gather: Gather) -> None:
        """Has all ranks gather the weights of a step that :meth:`note_ungathered` told of, whether or not this rank has copied
        them from the host since."""
        buffer = self._buffer
        if not self._is_ungathered or buffer is None:
            return
        self._meter.wait_for_step(self.name, self.gate)
        h2d_stream = self._streams.h2d_stream
        readers_finished_event = self._readers_finished if self._is_stale else self._readers_finished_event()
        with torch.no_grad(), self._streams.on(h2d_stream), named_range(f"megatrain::gather_weights ({self.name})"):
            # WAR: kernels issued before the step read the old weights. Later ones may read what this rank has copied since.
            h2d_stream.wait_event(readers_finished_event)
            gather.fetch(self.unit, buffer, self.name, self._meter, h2d_stream)
            self._params_copied_event.record(h2d_stream)
        self._is_stale = self._is_ungathered = False

    def push_weights(self, readers_finished_event: Any) -> None:
        """Issues the copies of the host's weights. Called by the step worker after the step, or by :meth:`wait_for_step`."""
        self._is_stale = False
        h2d_stream = self._streams.h2d_stream
        with torch.no_grad(), self._streams.on(h2d_stream), named_range(f"megatrain::push_weights ({self.name})"):
            # WAR: kernels issued before the step read the old weights.
            h2d_stream.wait_event(readers_finished_event)
            pushed = [state for state in self.unit.states if state.entry.spec.trainable]
            with self._meter.copying(Cause.H2D, sum(state.weight.nbytes for state in pushed), beside_compute=True):
                for state in pushed:
                    state.handle.fill(state.weight)
            self._params_copied_event.record(h2d_stream)

    def refresh_if_written(self) -> None:
        """Takes over weights that somebody wrote to the parameters on the device (``load_state_dict``)."""
        for state, weight in zip(self.unit.states, self._device_weights, strict=False):  # a closed unit has no states
            handle = state.handle
            if handle.is_written:
                self.wait_for_step()
                self.unit.write_master(state, state.parameter.detach())
                if not handle.is_shown and not self.unit.is_on_device:
                    weight.copy_(state.weight)
                handle.show(weight)
            elif not handle.is_shown:
                handle.show(weight)  # instead of another store's copy, which may be elsewhere

    def release(self) -> None:
        """Drops the weights on the device, whose parameters have been given back."""
        self._buffer, self._device_weights = None, []


UnitOwner = StreamedLayer | ResidentGroup

"""Resident groups: parameters outside the layers (embeddings, final norm, head). Weights stay on the device.

Their masters and moments live on the host like everybody's, unless the plan moves the whole unit to the device. Their
gradients are autograd's own, on the device, and leave it when the optimizer steps.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.optim.device_kernel import StepKernels
from megatrain_accelerate.streaming.clipping import NormTable
from megatrain_accelerate.streaming.fp32_sums import Fp32Sums
from megatrain_accelerate.streaming.meter import Cause, Meter, named_range
from megatrain_accelerate.streaming.streams import Streams
from megatrain_accelerate.streaming.update_gate import UpdateGate

if TYPE_CHECKING:
    from megatrain_accelerate.streaming.runtime import StreamingRuntime


class ResidentGroup:
    """One module's own parameters, outside all layers.

    Args:
        name: the module's qualified name.
        unit: the parameters' host memory; its weights are the source of the device's copy after each step.
        layers_before: how many of the model's layers come before it; it is stepped after these.
        streams, meter: the engine's.
    """

    def __init__(
        self,
        name: str,
        unit: HostUnit,
        layers_before: int,
        *,
        streams: Streams,
        meter: Meter,
    ) -> None:
        self.name = name
        self.layers_before = layers_before
        self.unit = unit
        self.gate = UpdateGate()
        self._streams = streams
        self._meter = meter
        self._params_copied_event = streams.event()
        self._gradients_ready_event = streams.event()
        self._gradients_copied_event = streams.event()
        self._in_flight: list[torch.Tensor] = []
        self._device_weights: dict[int, torch.Tensor] = {}
        self._show_device_weights()

    def _show_device_weights(self) -> None:
        for state in self.unit.states:
            # Clones also where the device is the CPU: the device's copies and the host's must not be one there either.
            on_device = self.unit.is_on_device
            weight = state.weight if on_device else state.weight.to(self._streams.device, copy=True)
            self._device_weights[id(state)] = weight
            is_sum, gradient = state.handle.has_fp32_sum, state.parameter.grad
            state.handle.set_gradient(None)
            state.handle.show(weight)
            state.handle.set_gradient(None if gradient is None else gradient.to(self._streams.device, copy=not on_device))
            self._place_sum_residual(state)
            if is_sum:
                state.handle.note_fp32_sum()

    def _place_sum_residual(self, state: ParameterState) -> None:
        """Gradients are on the device wherever the unit's states are, and so are the residuals of their sums."""
        if state.gradient_residual is not None and not self.unit.is_on_device:
            state.sum_residual = state.gradient_residual.to(self._streams.device, copy=True)

    def allocate_gradient_residuals(self) -> None:
        """Makes what fp32 sums of the gradients take, on the device, and for states on the host there too."""
        if self.unit.gradient_residuals is None:
            self.unit.allocate_gradient_residuals(register=True)
            for state in self.unit.states:
                self._place_sum_residual(state)

    def move_to_device(self, device: torch.device, kernels: StepKernels) -> None:
        """Masters and moments live on the device from now on, too. Nothing may be pending on the group."""
        self.unit.move_to_device(device, kernels)
        self._show_device_weights()

    def move_to_host(self) -> None:
        """Reverse of :meth:`move_to_device`."""
        self.unit.move_to_host()
        self._show_device_weights()

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on the device, without gradients."""
        return sum(state.parameter.nbytes for state in self.unit.states)

    def wait_for_step(self) -> None:
        """Kernels issued after this call read the stepped weights.

        Raises:
            StepWorkerError: the step failed.
        """
        start = time.perf_counter()
        self._meter.wait_for_step(self.name, self.gate.is_open, self.gate.wait)
        late_ms = 1e3 * (time.perf_counter() - start)
        # RAW: the copy of the stepped weights must be over.
        self._meter.compute_waits_for(self._params_copied_event, Cause.H2D, late_ms, of_layer=False)

    def fetch_gradients(self, norms: NormTable, sums: Fp32Sums, only: torch.Tensor | None = None) -> None:
        """Issues the copies to the host of the gradients that aren't there yet, and of their norms.

        Args:
            norms: table that gets the norms.
            sums: how the gradients are summed.
            only: consider this parameter only; all of the group's by default.
        """
        trainable = [state for state in self.unit.states if state.entry.spec.trainable]
        table = norms.of_unit(self.unit)
        for row, state in enumerate(trainable):
            parameter = state.parameter
            if parameter.grad is None or norms.is_current(parameter) or (only is not None and parameter is not only):
                continue
            # WAR: a step that is still to be applied reads the gradients of the pass before.
            self._meter.wait_for_step(self.name, self.gate.is_open, self.gate.wait)
            norm = sums.norms([state])[0]
            self._gradients_ready_event.record(self._streams.compute_stream)
            d2h_stream = self._streams.d2h_stream
            with self._streams.on(d2h_stream), named_range(f"megatrain::copy_gradients ({self.name})"):
                # RAW: gradient and norm must be finished.
                d2h_stream.wait_event(self._gradients_ready_event)
                if state.gradient is not None:
                    with self._meter.copying(Cause.D2H, state.gradient.nbytes):
                        state.gradient.copy_(parameter.grad, non_blocking=True)
                    self._meter.counters.d2h_bytes += state.gradient.nbytes
                    self._fetch_sum_residual(state)
                table[row].copy_(norm, non_blocking=True)
                self._gradients_copied_event.record(d2h_stream)
            norms.note(parameter, parameter.grad)
            # The allocator may hand out their memory again while the copy runs.
            self._in_flight += [norm, parameter.grad]

    def _fetch_sum_residual(self, state: ParameterState) -> None:
        residual = state.gradient_residual
        if state.handle.has_fp32_sum and residual is not None and state.sum_residual is not None:
            with self._meter.copying(Cause.D2H, residual.nbytes):
                residual.copy_(state.sum_residual, non_blocking=True)
            self._meter.counters.d2h_bytes += residual.nbytes

    def wait_for_gradients(self) -> None:
        """Blocks until the copies of :meth:`fetch_gradients` are over."""
        self._gradients_copied_event.synchronize()
        self._in_flight = []

    def announce_push(self) -> Any:
        """Called when a step is taken: counts the copies to come; returns the event for :meth:`push_weights`."""
        readers_finished_event = self._streams.event()
        readers_finished_event.record(self._streams.compute_stream)
        self._meter.counters.h2d_bytes += self.device_bytes
        return readers_finished_event

    def push_weights(self, readers_finished_event: Any) -> None:
        """Issues the copies of the host's weights to the device. Called by the step worker, after the step.

        Args:
            readers_finished_event: from :meth:`announce_push`, behind all kernels that read the old weights.
        """
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
        """Takes over weights that somebody wrote to the device's parameters (``load_state_dict``)."""
        for state in self.unit.states:
            weight, handle = self._device_weights[id(state)], state.handle
            if handle.is_written:
                self.wait_for_step()
                self.unit.write_master(state, state.parameter.detach())
                if not handle.is_shown and not self.unit.is_on_device:
                    weight.copy_(state.weight)
                handle.show(weight)
            elif not handle.is_shown:
                handle.show(weight)  # instead of another store's copy, which may lie elsewhere


def gradient_ready(runtime: weakref.ref[StreamingRuntime], parameter: torch.Tensor) -> None:
    """Hook of a resident parameter: tells the engine, if it is alive."""
    if (found := runtime()) is not None:
        found.resident_gradient_ready(parameter)

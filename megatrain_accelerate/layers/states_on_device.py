"""Which units of a model have the states of this process's shares on the device, and how these states return to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from megatrain_accelerate.errors import StepWorkerError
from megatrain_accelerate.kernels.device import device_kernels
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.store.device_states import DeviceStates, StepDevice
from megatrain_accelerate.store.segments import Segment
from megatrain_accelerate.store.shared_store import SharedStore
from megatrain_accelerate.store.step_worker import StepWorker
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.streams import Streams


class StatesOnDevice:
    """The units that live on the host and have :attr:`HostUnit.device_states`. Residuals and moments of any rank's share may
    be newer on its device than in the store that all ranks read. Whoever reads them there calls :meth:`bring` before."""

    def __init__(self, streams: Streams, worker: StepWorker, kernels: HostKernels, shared: SharedStore | None) -> None:
        self._streams, self._worker, self._kernels, self._shared = streams, worker, kernels, shared
        self.units: list[HostUnit] = []
        self.size_bytes = 0
        """Bytes of the states on the device, and of the buffers for gradients."""

    def place(self, units: Sequence[HostUnit]) -> None:
        """Gives these units states on the device, and takes them from all others, whose states must have been brought. A
        torch.OutOfMemoryError if they don't fit: then no unit has any."""
        if self._shared is not None:
            self._worker.watch(self._bring_if_asked if units else None)
        for unit in self.units:
            unit.device_states = None
        self.units, self.size_bytes = [], 0
        if units:
            kernels = device_kernels(self._streams.device, self._kernels)
            where = StepDevice(kernels, self._kernels, self._streams, [unit.share for unit in units])
            made = [DeviceStates(unit.layout, unit.share, unit.moments_dtype, where) for unit in units]
            for unit, states in zip(units, made, strict=True):
                unit.device_states = states
            self.units, self.size_bytes = list(units), where.size_bytes + sum(states.size_bytes for states in made)

    def step(self, unit: HostUnit, states: DeviceStates, segments: Sequence[Segment], expected: torch.Tensor | None) -> None:
        """Steps segments of this process's share as :meth:`DeviceStates.step` does. Called by the step worker."""
        if segments:
            if self._shared is not None:
                self._shared.note_states_ahead(True)
            states.step(unit.flat_states, segments, expected)

    def bring(self, of_all: bool = True) -> None:
        """Makes residuals and moments on the host those of the last step, to be read and written until the next one. With
        ``of_all`` also of the other ranks' shares, which their step workers bring, whatever these ranks do meanwhile. All
        steps that were taken must be applied. Not between a forward and its backward."""
        for unit in self.units:
            unit.bring_states()
        if self._shared is not None:
            self._shared.note_states_ahead(False)
            if of_all:
                self._shared.ask_for_states()

    def _bring_if_asked(self) -> None:
        """Called by the step worker while it is idle."""
        if self._shared is not None and self._shared.is_asked_for_states:
            self.bring(of_all=False)

    def leave(self) -> None:
        """Called when this process or the engine ends: brings its own states, and ends the worker. After a failed step it
        brings none, and no rank waits for them."""
        try:
            with contextlib.suppress(StepWorkerError):
                if self.units:
                    self._worker.drain()
                    self.bring(of_all=False)
        finally:
            if self._shared is not None:
                self._shared.note_states_ahead(False)
            self._worker.close()

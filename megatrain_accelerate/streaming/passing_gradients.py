"""Gradients that pass through the host: a few buffers for all streamed layers instead of a place for each layer's.

A layer's gradients are consumed by its step as soon as they have arrived (``step_schedule: backward``), so that only those on
their way need memory: 12 bytes a parameter of a layer instead of 14. What ``parameter.grad`` shows then is not-a-number.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import torch

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.memory.host_store import PASSING_BUFFERS
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.meter import Cause, Meter
from megatrain_accelerate.streaming.update_gate import UpdateGate


class PassingBuffers:
    """Owner of the buffers. Writer of one: the d2h stream. Reader: the step of the layer that took it, until its gate opens.

    Args:
        size_bytes: of the largest layer's gradients.
        huge_pages, register: see :class:`HostMemory`.
        meter: the engine's.
    """

    def __init__(self, size_bytes: int, *, huge_pages: bool, register: bool, meter: Meter) -> None:
        self._meter = meter
        self._memories = [HostMemory(size_bytes, huge_pages=huge_pages, register=register) for _ in range(PASSING_BUFFERS)]
        for memory in self._memories:
            memory.register()
        self._buffers = [memory.tensor(0, (size_bytes,), torch.uint8) for memory in self._memories]
        self._readers: list[UpdateGate | None] = [None] * PASSING_BUFFERS
        self._next = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(memory.size_bytes for memory in self._memories)

    def take(self, layer: StreamedLayer) -> torch.Tensor:
        """A buffer for the gradients of this layer; waits for the step that still reads it.

        Raises:
            StateError: the layer has gradients that no step consumed.
            StepWorkerError: the step failed.
        """
        if any(state.parameter.grad is not None for state in layer.unit.states):
            raise StateError(_NOT_STEPPED.format(layer.name))
        place = self._next
        self._next = (place + 1) % PASSING_BUFFERS
        reader = self._readers[place]
        if reader is not None and not reader.is_open:
            start = time.perf_counter()
            # WAR: the step of the layer that took the buffer last may still read it.
            with self._meter.blocked_by(Cause.HOST_STEP):
                reader.wait()
            self._meter.counters.optimizer_wait_ms += 1e3 * (time.perf_counter() - start)
        self._readers[place] = layer.gate
        return self._buffers[place]

    def close(self) -> None:
        """Unregisters the buffers."""
        for memory in self._memories:
            memory.close()


def gradient_that_passed(state: ParameterState) -> torch.Tensor:
    """What stands for a gradient that was consumed: its shape and dtype, one element of memory, and no number in it."""
    spec = state.entry.spec
    return torch.full((), torch.nan, dtype=spec.dtype).expand(spec.shape)


def require_stepped(layer: StreamedLayer, stepped: Sequence[bool]) -> None:
    """Checks that an optimizer took the layer's gradients.

    Raises:
        StateError: none did, and the next layers' would overwrite them.
    """
    if not any(stepped):
        raise StateError(_NOT_STEPPED.format(layer.name))


def refuse_unstepped(layers: Sequence[StreamedLayer], parameters: Collection[int]) -> None:
    """Checks that ``step()`` finds no gradient of a layer that wasn't consumed in a backward since the step before.

    Args:
        layers: all streamed layers.
        parameters: ``id`` of each parameter with such a gradient.

    Raises:
        StateError: there is one, and no place from which a step could read it.
    """
    for layer in layers:
        names = [state.name for state in layer.unit.states if id(state.parameter) in parameters]
        if names and layer.unit.passes_gradients and not layer.unit.is_on_device:
            raise StateError(
                f"{len(names)} gradients of layer {layer.name} (the first: {names[0]}) were set by the script, or consumed by "
                "an earlier step and not cleared, and gradients that pass have no place from which step() could read them; "
                "call optimizer.zero_grad() after each step, or set megatrain_config.host_gradients to 'kept' (2 bytes a "
                "parameter more)"
            )


_NOT_STEPPED = (
    "the gradients of layer {} can't be consumed in this backward: those of an earlier step weren't cleared (call "
    "optimizer.zero_grad() after each step), another backward comes before the step (accumulation, several forwards before "
    "one backward, a layer that is called twice), or no prepared Adam or AdamW has its parameters; for the latter two set "
    "megatrain_config.host_gradients to 'kept' (2 bytes a parameter more)"
)

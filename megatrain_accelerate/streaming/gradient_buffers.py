"""Gradients on their way to the host: buffers for those that are added to others, and for those that pass through.

Where gradients pass (``step_schedule: backward``), a layer's are consumed by its step as soon as they have arrived, so that
only those on their way need memory: 12 bytes a parameter of a layer instead of 14. What ``parameter.grad`` shows then is
not-a-number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.memory.host_store import PASSING_BUFFERS
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.optim.kernel import HostKernels
from megatrain_accelerate.optim.step_worker import Ticket
from megatrain_accelerate.streaming.fp32_sums import Fp32Sums, RunningSum
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.meter import Meter
from megatrain_accelerate.streaming.update_gate import UpdateGate


def of_their_own(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients, contiguous, each in memory of its own: autograd may hand out one tensor's memory twice (of a sum of two
    parameters), or views of something larger."""
    seen: set[int] = set()
    owned = []
    for gradient in gradients:
        storage = gradient.untyped_storage()
        is_shared = storage.data_ptr() in seen or storage.nbytes() != gradient.nbytes
        seen.add(storage.data_ptr())
        keeps = gradient.is_contiguous() and not is_shared
        owned.append(gradient if keeps else gradient.clone(memory_format=torch.contiguous_format))
    return owned


class Staging:
    """A host buffer for gradients that are to be added to earlier ones.

    Owner: the offloader. Writer: the d2h stream. Reader: the step worker, until ``ticket`` is done.
    """

    def __init__(self, size_bytes: int, huge_pages: bool, register: bool) -> None:
        self.memory = HostMemory(size_bytes, huge_pages=huge_pages, register=register)
        self.memory.register()
        self.buffer = self.memory.tensor(0, (size_bytes,), torch.uint8)
        self.ticket: Ticket | None = None


@dataclasses.dataclass(frozen=True)
class Addition:
    """What a parameter's new gradient is added to, on the host. Made by the launching thread, run by the step worker."""

    state: ParameterState
    earlier: torch.Tensor | None
    """``parameter.grad`` as it was."""
    running: RunningSum | None
    """The same where it is summed in fp32."""

    @classmethod
    def of(cls, state: ParameterState, sums: Fp32Sums) -> Addition:
        """The addition to what ``parameter.grad`` is now."""
        return cls(state, state.parameter.grad, sums.running(state))

    def note(self) -> None:
        """The whole gradient will be added: an fp32 sum is that of ``parameter.grad`` from now on."""
        if self.running is not None:
            self.state.handle.note_fp32_sum()

    def add(self, new: torch.Tensor | None, kernels: HostKernels, of_part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Adds a gradient (None: zeros), or that of the part of the whole tensor that ``of_part`` returns."""
        own, running = self.state.gradient, self.running
        assert own is not None
        if self.earlier is None:
            target = of_part(own.data)  # unseen by the version that the launching thread takes
            target.zero_() if new is None else target.copy_(new)
        elif running is not None:
            residual = of_part(running.residual)
            if new is not None:
                dataclasses.replace(running, gradient=of_part(running.gradient), residual=residual).add(new)
            elif not running.has_residual:
                residual.zero_()  # it counts from now on
        elif new is None:
            return
        elif self.earlier.data_ptr() == own.data_ptr():
            kernels.accumulate(of_part(own), new)
        else:  # somebody assigned a tensor of their own
            of_part(self.earlier).add_(new)

    def total_and_norm(self, sums: Fp32Sums) -> tuple[torch.Tensor, float]:
        """The whole gradient when all is added, and its norm."""
        total = self.state.gradient if self.earlier is None else self.earlier
        assert total is not None
        return total, sums.host_norm(total, None if self.running is None else self.running.residual)


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
            raise not_stepped(layer)
        place = self._next
        self._next = (place + 1) % PASSING_BUFFERS
        reader = self._readers[place]
        if reader is not None and not reader.is_open:
            # WAR: the step of the layer that took the buffer last may still read it.
            self._meter.wait_for_host(reader.wait)
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


def refuse_unstepped(layers: Sequence[StreamedLayer], parameters: Collection[int]) -> None:
    """Raises where ``step()`` finds gradients that no backward since the step before has consumed.

    Args:
        layers: all streamed layers.
        parameters: ``id`` of each parameter with such a gradient.

    Raises:
        StateError: one is a layer's, and lies where no step could read it.
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


def not_stepped(layer: StreamedLayer) -> StateError:
    """The error of a layer whose gradients no optimizer takes, so that the next layers' would overwrite them."""
    return StateError(
        f"the gradients of layer {layer.name} can't be consumed in this backward: those of an earlier step weren't cleared "
        "(call optimizer.zero_grad() after each step), another backward comes before the step (accumulation, several forwards "
        "before one backward, a layer that is called twice), or no prepared Adam or AdamW has its parameters; for the latter "
        "two set megatrain_config.host_gradients to 'kept' (2 bytes a parameter more)"
    )

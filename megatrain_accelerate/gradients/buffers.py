"""Host buffers for gradients, and the addition of gradients on the host. Gradients that pass (``host_gradients: passing``) are
consumed by their layer's step as soon as they have arrived, so that only those in flight need memory: 12 bytes a parameter of
a layer instead of 14. ``parameter.grad`` shows not-a-number then."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import torch

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.gradients.fp32_sums import Fp32Sums, RunningSum
from megatrain_accelerate.store.host_memory import HostMemory
from megatrain_accelerate.store.layout import FlatEntry
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.meter import Meter, UpdateGate
from megatrain_accelerate.transfer.parts import Stepped


def of_their_own(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients as contiguous tensors that share no memory. Autograd may hand out one tensor's memory twice (for a
    sum of two parameters), or views of a larger tensor."""
    seen: set[int] = set()
    owned = []
    for gradient in gradients:
        storage = gradient.untyped_storage()
        is_shared = storage.data_ptr() in seen or storage.nbytes() != gradient.nbytes
        seen.add(storage.data_ptr())
        keeps = gradient.is_contiguous() and not is_shared
        owned.append(gradient if keeps else gradient.clone(memory_format=torch.contiguous_format))
    return owned


class HostBuffers:
    """Host buffers of uint8 that are used in turn. Owner: the offloader. Writer: the d2h stream. Reader: the step worker,
    until the gate opens that was given to :meth:`take`."""

    def __init__(self, count: int, size_bytes: int, meter: Meter) -> None:
        self._meter = meter
        self.size_bytes = count * size_bytes
        memory = HostMemory(self.size_bytes, register=meter.streams.is_cuda)
        memory.register()
        buffers = memory.tensor(0, (count, size_bytes), torch.uint8)
        self._turns = collections.deque((buffer, UpdateGate()) for buffer in buffers)
        self.close = memory.close

    def take(self, reader: UpdateGate) -> torch.Tensor:
        """Returns the next buffer. Blocks until its last reader is done, and raises if that one failed."""
        buffer, before = self._turns[0]
        # WAR: the step or addition for which the buffer was taken last may still read it.
        self._meter.wait_for_step("last reader of a host gradient buffer", before)
        self._turns.popleft()
        self._turns.append((buffer, reader))
        return buffer


@dataclasses.dataclass(frozen=True)
class Addition:
    """Adds a parameter's new gradient to its earlier one on the host. Made by the launching thread, run by the step worker."""

    state: ParameterState
    earlier: torch.Tensor | None
    """``parameter.grad`` before the addition, if there was one."""
    running: RunningSum | None
    """``earlier`` as an fp32 sum. None if it isn't summed in fp32."""

    def add(self, new: torch.Tensor | None, sums: Fp32Sums, of: Callable[[FlatEntry, torch.Tensor], torch.Tensor]) -> None:
        """Adds a gradient (None stands for zeros) to the part of the whole tensor that ``of`` returns."""
        own, running = self.state.gradient, self.running
        of_part = functools.partial(of, self.state.entry)
        assert own is not None
        if self.earlier is None:
            target = of_part(own.data)  # .data: no version moves that the launching thread notes
            target.zero_() if new is None else target.copy_(new)
        elif running is not None:
            residual = of_part(running.residual)
            if new is not None:
                sums.kernels.accumulate_split(of_part(self.earlier), residual, new, running.has_residual)
            elif not running.has_residual:
                residual.zero_()  # the launching thread has noted that it counts
        elif new is None:
            return
        elif self.earlier.data_ptr() == own.data_ptr():
            sums.kernels.accumulate(of_part(own), new)
        else:  # the script assigned a tensor of its own
            of_part(self.earlier).add_(new)

    def total_and_norm(self, sums: Fp32Sums, unit: HostUnit) -> tuple[torch.Tensor, float]:
        """Returns the whole gradient after the last addition, and the norm of the part that this process steps."""
        total = self.state.gradient if self.earlier is None else self.earlier
        assert total is not None
        residual = None if self.running is None else unit.own_elements(self.state.entry, self.running.residual)
        return total, sums.host_norm(unit.own_elements(self.state.entry, total), residual)


def not_stepped(layer: Stepped) -> StateError:
    """The error for a layer whose gradients no optimizer consumes: those of the next layers would overwrite them."""
    return StateError(
        f"the gradients of layer {layer.name} can't be consumed in this backward. If those of an earlier step "
        "weren't cleared, call optimizer.zero_grad() after each step. If another backward comes before the step "
        "(accumulation, several forwards before one backward, a layer that is called twice), or no prepared Adam or AdamW has "
        "its parameters, set megatrain_config.host_gradients to 'kept' (2 bytes a parameter more)"
    )


def refuse_unstepped(layers: Sequence[Stepped], parameters: Collection[int]) -> None:
    """Raises a StateError if ``step()`` finds a gradient of a layer whose gradients pass, since no host memory holds it.
    ``parameters``: ``id`` of each parameter whose gradient no backward has consumed since the last step."""
    for layer in layers:
        names = [state.name for state in layer.unit.states if id(state.parameter) in parameters]
        if names and layer.unit.passes_gradients and not layer.unit.is_on_device:
            raise StateError(
                f"{len(names)} gradients of layer {layer.name} (the first: {names[0]}) were set by the script, or consumed by "
                "an earlier step and not cleared, and with host_gradients: passing, step() can't read gradients that no "
                "backward has consumed since the last step; call zero_grad() after each step, or set "
                "megatrain_config.host_gradients to 'kept' (2 bytes a parameter more)"
            )

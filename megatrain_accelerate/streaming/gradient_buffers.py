"""Gradients on their way: host buffers for those that are added to others, their addition, and what makes each own memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.optim.kernel import HostKernels
from megatrain_accelerate.optim.step_worker import Ticket
from megatrain_accelerate.streaming.fp32_sums import Fp32Sums, RunningSum


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
    """A host buffer for gradients that are to be added to earlier ones. Owner: the offloader. Writer: the d2h stream.

    Reader: the step worker, until ``ticket`` is done.
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
        """That to the gradient of now."""
        return cls(state, state.parameter.grad, sums.running(state))

    def note(self) -> None:
        """The whole gradient will be added: an fp32 sum is that of ``parameter.grad`` from now on."""
        if self.running is not None:
            self.state.handle.note_fp32_sum()

    def add(
        self,
        new: torch.Tensor | None,
        kernels: HostKernels,
        of_part: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole,
    ) -> None:
        """Adds a gradient, or that of a part.

        Args:
            new: what is added; None for zeros.
            kernels: the host's.
            of_part: the part of the whole tensor that it belongs to.
        """
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

"""Memory of gradients on their way: host buffers for those that are added to others, and what makes each own its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.optim.step_worker import Ticket


def of_their_own(gradients: list[torch.Tensor], others: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The gradients, contiguous, each in memory of its own: autograd may hand out one tensor twice (of a sum of two
    parameters, or a parameter and the hidden states), or views of something larger."""
    seen = {other.untyped_storage().data_ptr() for other in others if other is not None}
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

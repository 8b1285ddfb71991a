"""Exact, huge-page-backed, registered host memory, and device memory with the same interface.

torch's caching host allocator rounds each pinned block up to a power of two, which wastes up to half of a store that fills the
machine. Here memory is mapped in whole pages, advised to use huge pages, and registered with the CUDA driver. Memory that
isn't registered, since nothing streams from it yet, is copied on all host threads.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import mmap
import os
import weakref
from typing import Any

import torch

from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.pages import Pages, map_pages
from megatrain_accelerate.units import MIB, format_bytes, round_up

STAGED_BYTES = 32 * MIB
"""Size of each of two staging buffers. Its copy takes a millisecond or more, beside which issuing it costs nothing."""


def _unregister(process: int, address: int, mapping: Pages) -> None:
    # `mapping` is an argument so that the pages aren't unmapped before the driver has released them.
    if os.getpid() == process:  # CUDA can't be used in a forked child
        torch.cuda.cudart().cudaHostUnregister(address)


def _clear_last_error() -> None:
    """Clears the error that a refused call left in the CUDA runtime, and which the next kernel of this thread would raise as
    if it were its own: so this launches one. torch doesn't show the call that only clears it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


class HostMemory:
    """A mapping of whole pages of host memory: anonymous, or ``shared`` with other ranks. Owner: whoever made it. Tensors made
    by :meth:`tensor` keep it alive, as ordinary pageable memory after :meth:`close`. ``register``: whether :meth:`register`
    page-locks it for the current CUDA device. Raises a ``HostMemoryError`` if the kernel refuses the memory."""

    def __init__(self, size_bytes: int, *, register: bool, shared: Pages | None = None) -> None:
        self.size_bytes = round_up(max(size_bytes, 1), mmap.PAGESIZE)
        self._mapping = shared or map_pages(self.size_bytes)
        self.address = ctypes.addressof(self._mapping)
        self._finalizer: weakref.finalize | None = None
        self._register_wanted = register
        self.is_touched = False
        """Whether it counts as taken. Until somebody writes to its pages they are zero, and take no memory."""

    @property
    def is_registered(self) -> bool:
        """Whether the driver copies from and to it without a bounce buffer."""
        return self._finalizer is not None and self._finalizer.alive

    def register(self) -> None:
        """Page-locks the mapping, if that was asked for. Raises a ``HostMemoryError`` if the driver refuses. Call it after the
        first touch, which is faster with all threads."""
        if not self._register_wanted or self.is_registered:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(self.address, self.size_bytes, 0))
        if code != 0:
            _clear_last_error()
            raise HostMemoryError(
                f"the CUDA driver refused to page-lock {format_bytes(self.size_bytes)} of host memory (error {code}); "
                "raise the limit on locked memory (`ulimit -l unlimited`, in a container `--ulimit memlock=-1`), or free some"
            )
        self._finalizer = weakref.finalize(self, _unregister, os.getpid(), self.address, self._mapping)
        self._finalizer.atexit = False

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of the mapping, with its own storage: serialisers take a shared one for tied weights."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset_bytes).view(shape)

    def close(self) -> None:
        """Unregisters the memory, which is unmapped when the last tensor over it dies."""
        if self._finalizer is not None:
            self._finalizer()


class DeviceMemory:
    """A block of zeroed device memory with the interface of :class:`HostMemory`. Owner: the unit that lives in it. It is freed
    when the last tensor over it dies."""

    is_touched = True

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._block = torch.zeros(max(size_bytes, 1), dtype=torch.uint8, device=device)

    def register(self) -> None:
        """Does nothing."""

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of the block, with its own storage, see :meth:`HostMemory.tensor`."""
        part = self._block[offset_bytes : offset_bytes + math.prod(shape) * dtype.itemsize]
        return with_own_storage(part.view(dtype).view(shape))

    def close(self) -> None:
        """Does nothing."""


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage begins at its own address: serialisers take a shared one for tied weights."""
    return torch.from_dlpack(view.detach()) if view.numel() else torch.empty_like(view)


def copy_bytes(target: torch.Tensor, source: torch.Tensor, kernels: HostKernels) -> None:
    """Copies a contiguous tensor to another of its dtype. If either is on the host, the host's threads copy, and this returns
    when they are done: CUDA copies pageable memory on one thread only."""
    types = {target.device.type, source.device.type}
    if types == {"cpu"}:
        kernels.copy(target, source)
    elif types == {"cpu", "cuda"}:
        with torch.cuda.device(target.device if target.is_cuda else source.device):
            buffers = torch.empty(2, STAGED_BYTES, dtype=torch.uint8, pin_memory=True)  # torch keeps it for the next copy
            copy_staged(target, source, buffers, [torch.cuda.Event() for _ in buffers], kernels, to_host=source.is_cuda)
    else:
        target.copy_(source)


def copy_staged(
    target: torch.Tensor, source: torch.Tensor, buffers: torch.Tensor, events: list[Any], kernels: HostKernels, to_host: bool
) -> None:
    """Copies between host and device: the host fills or empties one of two page-locked ``buffers`` while the link copies the
    other. ``events``: one for each buffer. See :func:`copy_bytes`."""
    flat = (tensor.view(-1).view(torch.uint8).split(buffers.shape[1]) for tensor in (target, source))
    issued: collections.deque[tuple[torch.Tensor, torch.Tensor, Any]] = collections.deque()

    def finish_first() -> None:
        to, buffer, event = issued.popleft()
        event.synchronize()  # RAW: the copy to the buffer; WAR: the copy from it
        if to_host:
            kernels.copy(to, buffer)

    for turn, (to, origin) in enumerate(zip(*flat, strict=True)):
        if len(issued) == 2:
            finish_first()
        buffer, event = buffers[turn % 2, : to.numel()], events[turn % 2]
        if to_host:
            buffer.copy_(origin, non_blocking=True)
        else:
            kernels.copy(buffer, origin)
            to.copy_(buffer, non_blocking=True)
        event.record()
        issued.append((to, buffer, event))
    while issued:
        finish_first()

"""A pool of registered host memory for offloaded activations, in blocks. A block may consist of several ranges, wherever
memory is free: the pool never fragments, and never holds more than was in use at once, rounded up to a segment."""

from __future__ import annotations

import collections
from typing import Any

import torch

from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.store.host_limits import available_host_bytes
from megatrain_accelerate.store.host_memory import HostMemory
from megatrain_accelerate.units import KIB, format_bytes, round_up

GRANULE_BYTES = 64 * KIB
"""Blocks take multiples of this size: no range is so small that its copy costs more to issue than to run."""

HostBlock = list[torch.Tensor]
"""Bytes of the pool, uint8, in one or several ranges, in order, with exactly the requested size together. Each range begins at
a granule. Owner: whoever took the block, until :meth:`HostPool.give_back`."""


class HostPool:
    """Owner of registered segments of host memory, of at least ``segment_bytes`` each, and of their free ranges. One thread
    takes blocks. Any thread gives them back, with an event after which they are free."""

    def __init__(
        self, segment_bytes: int, *, kernels: HostKernels, register: bool, host_memory_gib: float | None = None
    ) -> None:
        self._segment_bytes, self._kernels, self._register = segment_bytes, kernels, register
        self._host_memory_gib = host_memory_gib
        self._segments: list[HostMemory] = []
        self.buffers: list[torch.Tensor] = []
        """Each segment as a whole. Blocks are views of them."""
        self._free: list[torch.Tensor] = []
        """Free ranges of the buffers, in whole granules."""
        self._pending: collections.deque[tuple[Any, HostBlock]] = collections.deque()

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def _free_bytes(self) -> int:
        return sum(part.numel() for part in self._free)

    def take(self, size_bytes: int) -> HostBlock:
        """A block of ``size_bytes`` (at least 1). Grows the pool only if too little is free. Raises a ``HostMemoryError`` if
        that would take more host memory than this process may use."""
        wanted = round_up(size_bytes, GRANULE_BYTES)
        for wait in (False, True):
            if self._free_bytes < wanted:
                self._reclaim(wait)
        if self._free_bytes < wanted:
            self._grow(wanted - self._free_bytes)
        block: HostBlock = []
        while size_bytes:
            free = self._free.pop(0)
            part, rest = free[:size_bytes], free[round_up(size_bytes, GRANULE_BYTES) :]
            if rest.numel():
                self._free.insert(0, rest)
            block.append(part)
            size_bytes -= part.numel()
        return block

    def give_back(self, block: HostBlock, event: Any) -> None:
        """Lets the block be taken again once ``event`` is over."""
        if self._segments:  # graphs may outlive a closed pool
            self._pending.append((event, block))

    def _reclaim(self, wait: bool) -> None:
        for _ in range(len(self._pending)):
            event, block = self._pending.popleft()
            if wait:
                event.synchronize()
            elif not event.query():
                self._pending.append((event, block))
                continue
            self._free += [part.as_strided((round_up(part.numel(), GRANULE_BYTES),), (1,)) for part in block]
        merged: list[torch.Tensor] = []
        for part in sorted(self._free, key=torch.Tensor.data_ptr):
            # A range that begins a segment isn't merged: two segments may be adjacent, too.
            if merged and part.storage_offset() and merged[-1].data_ptr() + merged[-1].numel() == part.data_ptr():
                before = merged.pop()
                part = before.as_strided((before.numel() + part.numel(),), (1,))
            merged.append(part)
        self._free = merged

    def _grow(self, missing_bytes: int) -> None:
        size = round_up(max(missing_bytes, self._segment_bytes), GRANULE_BYTES)
        available = available_host_bytes(self._host_memory_gib)
        if size > available:
            raise HostMemoryError(
                f"offloaded activations take {format_bytes(self.size_bytes)} of host memory and need "
                f"{format_bytes(size)} more, but only {format_bytes(available)} are free; lower "
                "megatrain_config.placement.offloaded_layers, set placement.offloaded_inputs to false, or take shorter batches"
            )
        memory = HostMemory(size, register=self._register)
        buffer = memory.tensor(0, (size,), torch.uint8)
        self._kernels.zero(buffer)
        memory.register()
        self._free.append(buffer)
        self._segments.append(memory)
        self.buffers.append(buffer)

    def close(self) -> None:
        """Unregisters the memory, which is unmapped when the last view of a block dies."""
        self._reclaim(wait=True)
        for segment in self._segments:
            segment.close()
        self._segments, self.buffers, self._free = [], [], []

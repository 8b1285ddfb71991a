"""Weights in memory-mapped files, as ``from_pretrained`` maps safetensors: finds their pages, reads them ahead and pages them
out. This is advice to the kernel. Where it isn't followed only speed changes."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import operator
from collections.abc import Iterable, Sequence

import torch

from megatrain_accelerate.pages import libc
from megatrain_accelerate.units import round_up

_MADV_PAGEOUT = 21  # Linux 5.4: releases clean pages, keeps those that were written to

PageRange = tuple[int, int]
"""Start and end address of some whole pages."""


class FileMappings:
    """The files that this process has mapped when this object is made. Empty if the system doesn't tell."""

    def __init__(self) -> None:
        self._files: list[PageRange] = []
        with contextlib.suppress(OSError), open("/proc/self/maps") as file:
            for line in file:
                addresses, _, _, _, inode, *_ = line.split()
                if inode != "0":
                    start, end = (int(address, 16) for address in addresses.split("-"))
                    self._files.append((start, end))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is in a mapped file."""
        place = bisect.bisect_right(self._files, tensor.data_ptr(), key=operator.itemgetter(0)) - 1
        return place >= 0 and tensor.data_ptr() < self._files[place][1]

    def pages(self, tensors: Iterable[torch.Tensor]) -> list[PageRange]:
        """Pages of those tensors that are in mapped files, shared pages included. Adjacent ones are one range."""
        found: list[PageRange] = []
        inside = (tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes and self.holds(tensor))
        for start, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in inside):
            first, end = start // mmap.PAGESIZE * mmap.PAGESIZE, round_up(start + size, mmap.PAGESIZE)
            if found and first <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((first, end))
        return found


def read_ahead(ranges: Sequence[PageRange]) -> None:
    """Starts to read the pages from disk, without waiting for them."""
    for start, end in ranges:
        libc.madvise(start, end - start, mmap.MADV_WILLNEED)


def page_out(ranges: Sequence[PageRange]) -> None:
    """Releases the memory of the pages. Whoever reads them again gets the same values, from disk."""
    for start, end in ranges:
        libc.madvise(start, end - start, _MADV_PAGEOUT)


def trim_heap() -> None:
    """Returns freed memory that the C library holds to the system: that of tensors too small for mappings of their own."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        libc.malloc_trim(0)

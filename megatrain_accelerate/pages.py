"""Pages of host memory that are mapped without a file descriptor: Python's ``mmap`` keeps one for each mapping of a file."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.units import format_bytes

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value

Pages = ctypes.Array[ctypes.c_char]
"""Mapped pages. They are unmapped when nothing refers to them or to their buffer any more."""


def map_pages(size_bytes: int, file: int = -1, offset: int = 0) -> Pages:
    """Maps whole pages, which are zero until written: private to this process, or shared by all that map the descriptor
    ``file``. They are huge pages if the kernel has any; others are only slower. Forked processes don't inherit them: a fork
    would copy the page tables, a later write would move registered pages away from where the driver knows them, and a child
    that outlives this process would hold the file. Raises ``HostMemoryError``, with size and remedy, if the kernel refuses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file < 0 else mmap.MAP_SHARED
    address = libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
    if address == _FAILED:
        raise HostMemoryError(
            f"the kernel refused {format_bytes(size_bytes)} of host memory ({os.strerror(ctypes.get_errno())}); "
            "check `ulimit -v`, vm.overcommit_memory and the free memory"
        )
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        libc.madvise(address, size_bytes, advice)
    pages = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(pages, _unmap, os.getpid(), address, size_bytes).atexit = False
    return pages


def _unmap(process: int, address: int, size_bytes: int) -> None:
    if os.getpid() == process:  # a forked child never had these pages, and may have its own at their address
        libc.munmap(address, size_bytes)

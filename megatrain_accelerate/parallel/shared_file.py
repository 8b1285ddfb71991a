"""Memory that the ranks of one machine map together: a file without a name, of huge pages where the system allows that.

Only the ranks' mappings and one descriptor of each hold it, none in processes that they fork, so that the kernel gives it
back with the last rank, however that ends. It isn't bound by the size of ``/dev/shm``, which is 64 MiB in many containers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.pages import Pages, map_pages
from megatrain_accelerate.parallel.huge_file import open_huge_file
from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.units import round_up

_LENGTH = 1 << 44
"""16 TiB, more than any host has: the file takes memory only where somebody wrote to it."""


class SharedFile:
    """One file of all ranks, and which ranges of it are taken. All ranks make it together, and reserve the same sizes in the
    same order. A ``HostMemoryError`` where the kernel refused it, or a rank can't open it."""

    def __init__(self, ranks: Ranks) -> None:
        self._end, self._ranks = 0, ranks.size
        try:
            if ranks.rank == 0:
                huge = open_huge_file()
                self._descriptor = os.memfd_create("megatrain", os.MFD_CLOEXEC) if huge is None else huge
                os.ftruncate(self._descriptor, _LENGTH)
                ranks.broadcast((os.getpid(), self._descriptor, os.fstat(self._descriptor)))
            else:
                process, descriptor, identity = ranks.broadcast(None)
                self._descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                if not os.path.samestat(os.fstat(self._descriptor), identity):
                    raise OSError(f"process {process} is another one here")
        except OSError as error:
            raise HostMemoryError(
                f"rank {ranks.rank} can't share host memory with the others of this machine ({error}); start all processes as "
                "one user, in one container, without a limit on the size of files (`ulimit -f unlimited`)"
            ) from error
        ranks.meet("sharing host memory")  # only then may the first rank close its descriptor
        close = weakref.finalize(self, os.close, self._descriptor)  # mappings stay as long as anybody holds them
        os.register_at_fork(after_in_child=close)

    def reserve(self, size_bytes: int) -> int:
        """The offset of a new range of ``size_bytes``, at the beginning of a page (of 4 KiB)."""
        offset = self._end
        self._end += round_up(max(size_bytes, 1), mmap.PAGESIZE)
        return offset

    def rows(self, kind: type[Any]) -> Any:
        """Reserves a row of this ctypes type for each rank, and maps them: an array of rows, zero at first."""
        rows = kind * self._ranks
        size_bytes = ctypes.sizeof(rows)
        return rows.from_buffer(self.map(self.reserve(size_bytes), size_bytes))

    def map(self, offset: int, size_bytes: int) -> Pages:
        """A mapping, of whole pages, that all ranks write to and read from. It is zero where nobody wrote."""
        return map_pages(round_up(max(size_bytes, 1), mmap.PAGESIZE), self._descriptor, offset)

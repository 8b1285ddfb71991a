"""Memory that the ranks of one machine map together: a file without a name, of huge pages if the system allows them. In it the
ranks also compare which collectives they run.

Only the ranks' mappings and one descriptor of each hold the file, and processes that they fork get neither. So the kernel
frees it with the last rank, however that ends. It isn't bound by the size of ``/dev/shm``, which is 64 MiB in many containers.

Most systems leave ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` at ``never``. Then shared memory has pages of 4 KiB,
which take ten times as long to allocate, and on which the host's AdamW is slower. A tmpfs may have a setting of its own, so a
helper process mounts one in a mount namespace, hands over an open file, and ends. The mount ends with it, but the file stays
as long as it is open or mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import weakref
import zlib
from typing import Any

from megatrain_accelerate.errors import HostMemoryError, RankError
from megatrain_accelerate.pages import Pages, map_pages
from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.units import round_up

_FILE_BYTES = 1 << 44
"""16 TiB, more than any host has. The file takes memory only where somebody wrote to it."""
_COMPARED = 1024
"""How many collectives a rank may be ahead of another and still be compared. All meet in every step, so none is further."""
_HELPER_SECONDS = 10.0
"""The helper's time limit. It takes 20 ms."""

_HELPER = r"""
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
CLONE_NEWNS, CLONE_NEWUSER, MS_REC_PRIVATE = 0x20000, 0x10000000, 0x44000
user, group = os.geteuid(), os.getegid()
call("unshare", CLONE_NEWNS | (CLONE_NEWUSER if user else 0))
if user:  # who isn't mapped can't own a file
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as entry:
            entry.write(text)
call("mount", b"none", b"/", None, MS_REC_PRIVATE, None)
call("mount", b"megatrain", os.fsencode(sys.argv[2]), b"tmpfs", 0, b"huge=advise,size=0")
file = os.open(sys.argv[2], os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"file"], [file])
"""


def open_huge_file() -> int | None:
    """Opens an empty file without a name or a size limit, whose mappings get huge pages under MADV_HUGEPAGE. Returns its
    descriptor, or None if mounting fails, as in most containers."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_HELPER_SECONDS)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [sys.executable or "python3", "-I", "-S", "-c", _HELPER, str(theirs.fileno()), tempfile.gettempdir()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_HELPER_SECONDS,
                check=True,
            )
            _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
            os.set_inheritable(descriptor, False)
            return descriptor
    return None


shared_files: weakref.WeakSet[SharedFile] = weakref.WeakSet()
"""The files that this process shares with other ranks."""


class SharedFile:
    """One file for all ranks, whose ranges are reserved one after the other. All ranks make it together, and reserve the same
    sizes in the same order. Raises ``HostMemoryError`` if the kernel refuses it, or a rank can't open it."""

    def __init__(self, ranks: Ranks) -> None:
        self._end, self._ranks = 0, ranks.size
        try:
            if ranks.rank == 0:
                huge = open_huge_file()
                self._descriptor = os.memfd_create("megatrain", os.MFD_CLOEXEC) if huge is None else huge
                os.ftruncate(self._descriptor, _FILE_BYTES)
                ranks.broadcast((os.getpid(), self._descriptor, os.fstat(self._descriptor)))
            else:
                process, descriptor, identity = ranks.broadcast(None)
                self._descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                if not os.path.samestat(os.fstat(self._descriptor), identity):
                    raise OSError(f"process {process} has another id in this process's PID namespace")
        except OSError as error:
            raise HostMemoryError(
                f"rank {ranks.rank} can't share host memory with the others of this machine ({error}); start all processes as "
                "one user, in one container, without a limit on the size of files (`ulimit -f unlimited`)"
            ) from error
        ranks.meet("sharing host memory")  # only then may the first rank close its descriptor
        self._close = weakref.finalize(self, os.close, self._descriptor)  # mappings stay as long as anybody holds them
        os.register_at_fork(after_in_child=self._close)
        shared_files.add(self)

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Memory that the file takes, whichever ranks wrote to it, and this rank's equal share of that."""
        held = 512 * os.fstat(self._descriptor).st_blocks if self._close.alive else 0  # a forked process has no part in it
        return held, held // self._ranks

    def reserve(self, size_bytes: int) -> int:
        """Reserves a range of ``size_bytes``, and returns its offset, which is the beginning of a page (of 4 KiB)."""
        offset = self._end
        self._end += round_up(max(size_bytes, 1), mmap.PAGESIZE)
        return offset

    def rows(self, kind: type[Any]) -> Any:
        """Reserves a row of this ctypes type for each rank, and maps them: an array of rows, zero at first."""
        rows = kind * self._ranks
        size_bytes = ctypes.sizeof(rows)
        return rows.from_buffer(self.map(self.reserve(size_bytes), size_bytes))

    def map(self, offset: int, size_bytes: int) -> Pages:
        """Maps whole pages, which all ranks write to and read from. They are zero until written."""
        return map_pages(round_up(max(size_bytes, 1), mmap.PAGESIZE), self._descriptor, offset)


class OrderCheck:
    """Checks that all ranks run collectives of one kind (``what`` they exchange) in one order: each compares its last ones,
    listed in the file, with those of ranks ahead. Else two layers of one shape could be mixed up unnoticed."""

    def __init__(self, file: SharedFile, ranks: Ranks, what: str) -> None:
        self._rank, self._count, self._what = ranks.rank, 0, what
        self._rows = file.rows(ctypes.c_uint64 * _COMPARED)
        self._names: dict[int, str] = {}

    def enter(self, name: str) -> None:
        """To be called before each collective. Raises ``RankError`` if another rank's of this number has another name."""
        self._count += 1
        code = zlib.crc32(name.encode())
        self._names.setdefault(code, name)
        self._rows[self._rank][self._count % _COMPARED] = self._count << 32 | code
        for rank, row in enumerate(self._rows):
            number, other = divmod(row[self._count % _COMPARED], 1 << 32)
            if number == self._count and other != code:
                raise RankError(
                    f"rank {self._rank} exchanges {self._what} of {name} where rank {rank} exchanges those of "
                    f"{self._names.get(other, 'another layer')}: the ranks run different layers, or the same ones in a "
                    "different order. Layers that are left out at random (layerdrop) must be left out on all ranks alike; set "
                    "their probability to 0"
                )

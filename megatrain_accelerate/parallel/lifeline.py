"""What ends a rank when another has ended: it would wait for minutes in a collective, and the cause would be buried.

A thread watches the other ranks' processes by descriptors of the kernel's (``pidfd_open``), which forked data loaders don't
keep open as they do sockets. A rank that fails writes its cause where the others read it.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import select
import sys
import threading
import time
from types import TracebackType

from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.parallel.shared_file import SharedFile
from megatrain_accelerate.units import round_up

_CAUSE_BYTES = 1000
_SAME = "Every process must run the same script, and take as many steps"
_POLL_MILLISECONDS = 100
_GRACE_SECONDS = 0.5
"""Time to learn that another rank has ended, before a failed collective is taken for this rank's own failure."""


class _Notice(ctypes.Structure):
    """What a rank leaves to the others."""

    _fields_ = (("left_in_order", ctypes.c_int64), ("cause", ctypes.c_char * (_CAUSE_BYTES + 8)))


class Lifeline:
    """Ends this process within milliseconds when another rank ends before its time, and prints which one and why."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._file = SharedFile(ranks)
        size = round_up(ctypes.sizeof(_Notice) * ranks.size, mmap.PAGESIZE)
        self._notices = (_Notice * ranks.size).from_buffer(self._file.map(self._file.reserve(size), size))
        processes = ranks.gather(os.getpid())
        self._watched = {os.pidfd_open(process): rank for rank, process in enumerate(processes) if rank != ranks.rank}
        self._processes = processes
        self._hook_before, sys.excepthook = sys.excepthook, self._report
        atexit.register(self._leave)
        threading.Thread(target=self._watch, name="megatrain-lifeline", daemon=True).start()

    def _leave(self) -> None:
        """At the end of the interpreter: whoever has raised has told so before."""
        self._notices[self._rank].left_in_order = not self._notices[self._rank].cause

    def _report(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """The interpreter's ``sys.excepthook``: an exception ends this rank."""
        if isinstance(error, RuntimeError):
            time.sleep(_GRACE_SECONDS)  # a collective whose other end is gone: the thread tells why, and ends this process
            if gone := [rank for rank, notice in enumerate(self._notices) if notice.left_in_order]:
                print(f"megatrain: ranks {gone} ended before, without an error. {_SAME}", file=sys.stderr, flush=True)
        self._notices[self._rank].cause = f"{kind.__name__}: {error}".encode()[:_CAUSE_BYTES]
        self._hook_before(kind, error, traceback)

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        while True:
            ended = {self._watched[descriptor] for descriptor, _ in poll.poll(_POLL_MILLISECONDS)}
            for rank, notice in enumerate(self._notices):
                if rank != self._rank and (notice.cause or (rank in ended and not notice.left_in_order)):
                    self._end(rank)
            for descriptor in [descriptor for descriptor, rank in self._watched.items() if rank in ended]:
                poll.unregister(descriptor)
                os.close(descriptor)
                del self._watched[descriptor]

    def _end(self, rank: int) -> None:
        cause = self._notices[rank].cause.decode(errors="replace") or "it was killed, perhaps for the memory that it took"
        print(
            f"megatrain: rank {rank} (process {self._processes[rank]}) has ended: {cause}. Rank {self._rank} ends with it; "
            "resume from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

"""Ends a rank when another has died: it would wait in a collective for minutes, and the cause would be buried.

A thread watches the other ranks' processes by ``pidfd_open``. Such a descriptor tells that a process has ended even while data
loaders that it forked live on, which would keep a socket open. A rank that fails writes its cause where the others read it.
Each rank also writes the place where it last came to meet the others. A rank that waits for one that is alive, but stopped or
in an endless loop, names it, and ends shortly before ``ddp_timeout``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
from multiprocessing import connection
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.parallel.shared_file import SharedFile

_CAUSE_BYTES, _PLACE_BYTES = 1000, 120
_SAME = "Every process must run the same script, and take as many steps"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 0.5
"""Time to learn that another rank has ended, before a failed collective counts as this rank's own failure."""
_NOTICE_SECONDS = 120.0
"""How long a rank waits for another before it says so. Plans and checkpoints of the largest models take this long."""
_SHARE_OF_TIMEOUT = 0.9
"""The share of ``ddp_timeout`` after which a waiting rank ends: before the collective fails, which names no rank."""


class _Notice(ctypes.Structure):
    """What a rank tells the others, in memory that all map."""

    _fields_ = (
        ("left_in_order", ctypes.c_int64),
        ("meetings", ctypes.c_int64),
        ("place", ctypes.c_char * (_PLACE_BYTES + 8)),
        ("cause", ctypes.c_char * (_CAUSE_BYTES + 8)),
    )


class Lifeline:
    """Ends this process within a second when another rank has died or raised, and prints which one and why. Shortly before the
    timeout, also when another one doesn't come to a meeting (of :class:`Ranks`) where this one waits."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._rank = ranks, ranks.rank
        self._notices = SharedFile(ranks).rows(_Notice)
        self._processes = ranks.gather(os.getpid())
        self._watched = {os.pidfd_open(pid): rank for rank, pid in enumerate(self._processes) if rank != ranks.rank}
        self._since, self._has_printed = time.monotonic(), False
        """When this rank's last meeting began, and whether it has printed that it waits there."""
        self._hook_before, sys.excepthook = sys.excepthook, self._report
        # Not atexit, which doesn't run in ranks that a notebook's launcher forked. Processes that a rank forks don't run this.
        Finalize(None, self._leave, exitpriority=0)
        threading.Thread(target=self._watch, name="megatrain-lifeline", daemon=True).start()

    def _leave(self) -> None:
        """Called at the end of this process. A rank that raised has written its cause before."""
        own = self._notices[self._rank]
        own.meetings = self._ranks.meetings
        own.left_in_order = not own.cause
        if own.left_in_order:
            _made.cache_clear()  # it holds the group of all, whose threads end with the last reference to it
            self._ranks.leave()

    def _report(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """This rank's ``sys.excepthook``: tells the others of an exception that ends it. Forked processes aren't ranks."""
        if os.getpid() != self._processes[self._rank]:
            return self._hook_before(kind, error, traceback)
        if isinstance(error, RuntimeError):
            time.sleep(_GRACE_SECONDS)  # if a collective's other end is gone, the thread tells why, and ends this process
            if gone := [rank for rank, notice in enumerate(self._notices) if notice.left_in_order]:
                print(f"megatrain: ranks {gone} ended before, without an error. {_SAME}", file=sys.stderr, flush=True)
        self._tell(f"{self._name(self._rank)} has ended: {kind.__name__}: {error}")
        self._hook_before(kind, error, traceback)

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank]})"

    def _tell(self, cause: str) -> None:
        self._notices[self._rank].cause = cause.encode()[:_CAUSE_BYTES]

    def _watch(self) -> None:
        while True:
            self._watch_meeting()
            readable: list[Any] = connection.wait(self._watched, _POLL_SECONDS)
            ended = {self._watched[descriptor] for descriptor in readable}
            for rank, notice in enumerate(self._notices):
                if rank != self._rank and (notice.cause or (rank in ended and not notice.left_in_order)):
                    cause = notice.cause.decode(errors="replace")
                    killed = "has ended without an error: it was killed, perhaps for the memory that it took"
                    self._end(cause or f"{self._name(rank)} {killed}")
            for descriptor in readable:
                os.close(descriptor)
                del self._watched[descriptor]

    def _watch_meeting(self) -> None:
        """Publishes this rank's meetings and place, and finds the ranks that it waits for. The first of the waiting ranks
        prints once that it waits. Ends this process if waiting is useless."""
        ranks, own = self._ranks, self._notices[self._rank]
        if own.meetings != (begun := ranks.meetings):  # which the main thread may change at any time
            self._since, self._has_printed = time.monotonic(), False
        own.meetings, own.place = begun, ranks.place.encode(errors="replace")[:_PLACE_BYTES]
        meetings = [notice.meetings for notice in self._notices]
        missing = [rank for rank, count in enumerate(meetings) if count < own.meetings] if ranks.waits else []
        seconds = time.monotonic() - self._since
        gone = [rank for rank in missing if self._notices[rank].left_in_order]
        if gone and seconds > _GRACE_SECONDS:
            self._end(f"{self._name(gone[0])} has ended before, without an error. {_SAME}")
        if missing and seconds > _SHARE_OF_TIMEOUT * ranks.timeout.total_seconds():
            self._end(f"{self._waited(missing[0], seconds)} (ddp_timeout)")
        is_first = max(meetings[: self._rank], default=-1) < own.meetings
        if missing and seconds > _NOTICE_SECONDS and is_first and not self._has_printed:
            self._has_printed = True
            print(f"megatrain: {self._waited(missing[0], seconds)}, and goes on waiting", file=sys.stderr, flush=True)

    def _waited(self, other: int, seconds: float) -> str:
        place = self._notices[other].place.decode(errors="replace")
        return f"rank {self._rank} has waited for {self._name(other)}, which was last at {place!r}, for {seconds:.0f} s"

    def _end(self, cause: str) -> None:
        print(f"megatrain: {cause}. Rank {self._rank} ends, too; resume from the last checkpoint", file=sys.stderr, flush=True)
        self._tell(cause)  # for those who learn of this rank's end first
        os._exit(1)


def ranks_of_run() -> Ranks | None:
    """The ranks of this training, or None with one process. All ranks make the first call together, which makes their control
    group and starts their :class:`Lifeline`."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return _made(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _made(world: dist.ProcessGroup) -> Ranks:
    """The ranks of the group of all, ``world``, which a script may end and make anew."""
    ranks = Ranks()
    Lifeline(ranks)  # its thread keeps it alive
    return ranks

"""What ends a rank when another has died: it would wait for minutes in a collective, and the cause would be buried.

A thread watches the other ranks' processes by ``pidfd_open``: such a descriptor tells that a process has ended even while the
data loaders that it forked live on, in which a socket of its would stay open. A rank that fails writes its cause where the
others read it. And each writes where it met the others last: a rank that waits for one that is alive, but stopped or in an
endless loop, says for which, and ends when it has waited for ``ddp_timeout``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import sys
import threading
import time
from multiprocessing.util import Finalize
from types import TracebackType

import torch.distributed as dist

from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.parallel.shared_file import SharedFile

_CAUSE_BYTES, _PLACE_BYTES = 1000, 120
_SAME = "Every process must run the same script, and take as many steps"
_POLL_MILLISECONDS = 100
_GRACE_SECONDS = 0.5
"""Time to learn that another rank has ended, before a failed collective is taken for this rank's own failure."""
_NOTICE_SECONDS = 120.0
"""How long a rank waits for another before it says so. Plans and checkpoints of the largest models take as long."""
_SHARE_OF_TIMEOUT = 0.9
"""After so much of it a rank ends that waits for another: before a collective does, which wouldn't name it."""


class _Notice(ctypes.Structure):
    """What a rank leaves to the others."""

    _fields_ = (
        ("left_in_order", ctypes.c_int64),
        ("meetings", ctypes.c_int64),
        ("place", ctypes.c_char * (_PLACE_BYTES + 8)),
        ("cause", ctypes.c_char * (_CAUSE_BYTES + 8)),
    )


class Lifeline:
    """Ends this process within a second when another rank has died or raised, and prints which one and why; later where
    another doesn't come to where this one waits."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._rank = ranks, ranks.rank
        self._notices = SharedFile(ranks).rows(_Notice)
        self._processes = ranks.gather(os.getpid())
        self._watched = {os.pidfd_open(pid): rank for rank, pid in enumerate(self._processes) if rank != ranks.rank}
        self._waits_for: tuple[int, list[int]] = 0, []
        """The number of this rank's last meeting, and who hasn't come to it."""
        self._since, self._is_told = 0.0, False
        """Since when that is so, and whether somebody was told."""
        self._hook_before, sys.excepthook = sys.excepthook, self._report
        # Not atexit, which doesn't run in ranks that a notebook's launcher forked. Processes that a rank forks don't run this.
        Finalize(None, self._leave, exitpriority=0)
        threading.Thread(target=self._watch, name="megatrain-lifeline", daemon=True).start()

    def _leave(self) -> None:
        """At the end of this process. A rank that has raised has left its cause before."""
        own = self._notices[self._rank]
        own.meetings = self._ranks.meetings
        own.left_in_order = not own.cause
        if own.left_in_order:
            _made.cache_clear()  # it holds the group of all, whose threads end with the last reference to it
            self._ranks.leave()

    def _report(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """The interpreter's ``sys.excepthook``: an exception ends this rank, if it isn't one of a process that it forked."""
        if os.getpid() != self._processes[self._rank]:
            return self._hook_before(kind, error, traceback)
        if isinstance(error, RuntimeError):
            time.sleep(_GRACE_SECONDS)  # a collective whose other end is gone: the thread tells why, and ends this process
            if gone := [rank for rank, notice in enumerate(self._notices) if notice.left_in_order]:
                print(f"megatrain: ranks {gone} ended before, without an error. {_SAME}", file=sys.stderr, flush=True)
        self._tell(f"{self._name(self._rank)} has ended: {kind.__name__}: {error}")
        self._hook_before(kind, error, traceback)

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank]})"

    def _tell(self, cause: str) -> None:
        self._notices[self._rank].cause = cause.encode()[:_CAUSE_BYTES]

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        while True:
            self._watch_meeting()
            ended = {self._watched[descriptor] for descriptor, _ in poll.poll(_POLL_MILLISECONDS)}
            for rank, notice in enumerate(self._notices):
                if rank != self._rank and (notice.cause or (rank in ended and not notice.left_in_order)):
                    cause = notice.cause.decode(errors="replace")
                    killed = "has ended without an error: it was killed, perhaps for the memory that it took"
                    self._end(cause or f"{self._name(rank)} {killed}")
            for descriptor in [descriptor for descriptor, rank in self._watched.items() if rank in ended]:
                poll.unregister(descriptor)
                os.close(descriptor)
                del self._watched[descriptor]

    def _watch_meeting(self) -> None:
        """Notes where this rank has met the others last, and looks for whom it waits: says so after a while, once and by the
        first of those that wait, and ends where it is no use."""
        ranks, own = self._ranks, self._notices[self._rank]
        own.meetings, own.place = ranks.meetings, ranks.place.encode()[:_PLACE_BYTES]
        meetings = [notice.meetings for notice in self._notices]
        missing = [rank for rank, count in enumerate(meetings) if count < own.meetings] if ranks.waits else []
        if (own.meetings, missing) != self._waits_for:
            self._waits_for, self._since, self._is_told = (own.meetings, missing), time.monotonic(), False
        if not missing:
            return
        seconds = time.monotonic() - self._since
        first = missing[0]
        late = f"{self._name(first)}, which was last at {self._notices[first].place.decode(errors='replace')!r}"
        waited = f"rank {self._rank} has waited for {late}, for {seconds:.0f} s"
        if self._notices[first].left_in_order and seconds > 2 * _GRACE_SECONDS:
            self._end(f"{self._name(first)} has ended before, without an error. {_SAME}")
        if seconds > _SHARE_OF_TIMEOUT * ranks.timeout.total_seconds():
            self._end(f"{waited} (ddp_timeout)")
        if seconds > _NOTICE_SECONDS and not self._is_told and meetings.index(own.meetings) == self._rank:
            self._is_told = True
            print(f"megatrain: {waited}, and goes on waiting", file=sys.stderr, flush=True)

    def _end(self, cause: str) -> None:
        print(f"megatrain: {cause}. Rank {self._rank} ends, too; resume from the last checkpoint", file=sys.stderr, flush=True)
        self._tell(cause)  # for those who learn of this rank's end first
        os._exit(1)


def ranks_of_run() -> Ranks | None:
    """Those of this training, or None with one process. All ranks make the first call together: it makes their control group
    and starts their :class:`Lifeline`."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return _made(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _made(world: dist.ProcessGroup) -> Ranks:
    """``world``: the group of all, which a script may end and make anew."""
    ranks = Ranks()
    Lifeline(ranks)  # its thread keeps it alive
    return ranks

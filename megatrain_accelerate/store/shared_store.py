"""The store that all ranks of a machine share. Each rank steps its share of every unit."""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Callable, Mapping

from megatrain_accelerate.errors import RankError
from megatrain_accelerate.kernels.host import memory_fence
from megatrain_accelerate.pages import Pages
from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.parallel.shared_file import OrderCheck, SharedFile
from megatrain_accelerate.store.layout import FlatLayout

_ALL = 1 << 62
_POLL_SECONDS = 50e-6
_POLLS_WITHOUT_SLEEP = 200


class SharedStore:
    """Memory and step counters of ``units`` units, mapped by all ranks. All make it, and its units, in the same order."""

    def __init__(self, ranks: Ranks, units: int) -> None:
        self.ranks = ranks
        self.file = SharedFile(ranks)
        self.steps = self.file.rows(ctypes.c_int64 * units)
        """How many steps of each unit each rank has applied to its share. A rank's row is written by its step worker."""
        self.order = OrderCheck(self.file, ranks, "gradients")
        self.units = 0
        """Number of units made so far."""
        self._asked = self.file.rows(ctypes.c_int64)
        """How often each rank has asked all others for the states of their shares."""
        self._answered = self.file.rows(ctypes.c_int64 * ranks.size)
        """For each rank, the last request of every rank that it has answered. :data:`_ALL` if the host has its states."""
        self.note_states_ahead(False)
        self.is_loading = False
        """Whether ``load_state_dict`` may have written to weights since the last training forward. Ranks may make no other
        write to shared weights: here each writes the same values."""

    def note_states_ahead(self, are_ahead: bool) -> None:
        """Notes whether any states of this rank's shares are newer on the device than on the host."""
        memory_fence()  # other ranks see the states before the number that announces them
        answered = self._answered[self.ranks.rank]
        if are_ahead != (answered[0] != _ALL):
            answered[:] = [asked if are_ahead else _ALL for asked in self._asked]

    @property
    def is_asked_for_states(self) -> bool:
        """Whether any rank waits for this one in :meth:`ask_for_states`."""
        return any(asked > done for asked, done in zip(self._asked, self._answered[self.ranks.rank], strict=True))

    def ask_for_states(self) -> None:
        """Blocks until every rank's step worker has brought the states of its shares to the host. A rank may call it alone."""
        rank = self.ranks.rank
        self._asked[rank] += 1
        asked = self._asked[rank]
        memory_fence()
        wait_for(
            lambda: [other for other, answered in enumerate(self._answered) if answered[rank] < asked],
            "haven't brought their states to the host",
            "resume a process that is stopped (in a debugger, say), or end all processes and resume from the last checkpoint",
            self.ranks.timeout,
        )
        memory_fence()  # what is read from now on isn't older


class SharedUnit:
    """One unit's ranges of the shared memory, by kind, and the share of the unit that this rank steps."""

    def __init__(self, store: SharedStore, layout: FlatLayout, sizes: Mapping[str, int]) -> None:
        self.ranks = store.ranks
        self.share = layout.share_of(self.ranks.rank, self.ranks.size)
        self.store, self._index = store, store.units
        store.units += 1
        self._places = {kind: (store.file.reserve(size), size) for kind, size in sizes.items()}
        self.mapped: dict[str, int] = {}
        """Bytes of the kinds of memory that were ever mapped. They stay on the host, wherever the unit moves."""
        self._steps = 0

    def map(self, kind: str) -> Pages:
        """Maps the unit's memory of one kind."""
        offset, size = self._places[kind]
        self.mapped[kind] = size
        return self.store.file.map(offset, size)

    def note_applied(self) -> None:
        """Called by the step worker when it has stepped this rank's share."""
        memory_fence()  # other ranks see the weights before the number that announces them
        self.store.steps[self.ranks.rank][self._index] += 1

    def next_step(self, name: str) -> StepOfAll:
        """The step of the unit that is about to be taken. Called once for each step, on every rank."""
        self._steps += 1
        return StepOfAll(self.store, self._index, self._steps, name)


class StepOfAll:
    """A step of a unit, of which every rank applies its share."""

    def __init__(self, store: SharedStore, unit: int, steps: int, name: str) -> None:
        self._rows, self._timeout = store.steps, store.ranks.timeout
        self._unit, self._steps, self._name = unit, steps, name

    @property
    def is_done(self) -> bool:
        """Whether all ranks have applied their shares."""
        return not self._late()

    def wait(self) -> None:
        """Blocks until all ranks have applied their shares. A ``RankError`` names those that haven't in ``ddp_timeout``."""
        what = f"haven't applied step {self._steps} of {self._name}"
        wait_for(self._late, what, "every process must take every step", self._timeout)

    def _late(self) -> list[int]:
        late = [rank for rank, row in enumerate(self._rows) if row[self._unit] < self._steps]
        memory_fence()  # what is read from now on isn't older
        return late


def wait_for(late: Callable[[], list[int]], what: str, why: str, timeout: datetime.timedelta) -> None:
    """Blocks until ``late`` returns no ranks. After ``timeout`` a ``RankError`` names those that it returns, with ``what``
    they haven't done and some advice (``why``)."""
    seconds, polls = timeout.total_seconds(), 0
    end = time.monotonic() + seconds
    while late_ranks := late():
        polls += 1
        if polls > _POLLS_WITHOUT_SLEEP:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > end:
                raise RankError(f"ranks {late_ranks} {what} after {seconds:.0f} s; {why}")

"""The store of several ranks: one for all of a machine, of which each rank steps its share."""

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
    """Memory and step counters of so many ``units``, mapped by all ranks. They make it, and its units, in the same order."""

    def __init__(self, ranks: Ranks, units: int) -> None:
        self.ranks = ranks
        self.file = SharedFile(ranks)
        self.steps = self.file.rows(ctypes.c_int64 * units)
        """How many steps of each unit each rank has applied to its share: a row for each rank, written by its step worker."""
        self.order = OrderCheck(self.file, ranks, "gradients")
        self.units = 0
        """So far."""
        self._asked = self.file.rows(ctypes.c_int64)
        """How often each rank has asked all others for the states of their shares."""
        self._answered = self.file.rows(ctypes.c_int64 * ranks.size)
        """For each rank, the last of every rank's requests that it has answered; :data:`_ALL` if the host has its states."""
        self.note_states_ahead(False)
        self.is_loading = False
        """Whether ``load_state_dict`` may have written to weights since the last training forward: the only write that ranks
        may make to what they share, since each writes the same values."""

    def note_states_ahead(self, are_ahead: bool) -> None:
        """Records whether any states of this rank's shares are newer on the device than on the host."""
        memory_fence()  # others see the states before the number that tells of them
        answered = self._answered[self.ranks.rank]
        if are_ahead != (answered[0] != _ALL):
            answered[:] = [asked if are_ahead else _ALL for asked in self._asked]

    @property
    def is_asked_for_states(self) -> bool:
        """Whether any rank waits for this one in :meth:`ask_for_states`."""
        return any(asked > done for asked, done in zip(self._asked, self._answered[self.ranks.rank], strict=True))

    def ask_for_states(self) -> None:
        """Returns when every rank has the states of its shares on the host. Any rank may call it alone: the others' step
        workers bring them."""
        rank = self.ranks.rank
        self._asked[rank] += 1
        asked = self._asked[rank]
        memory_fence()
        wait_for(
            lambda: [other for other, answered in enumerate(self._answered) if answered[rank] < asked],
            "haven't brought their states to the host",
            "let a process go on that is stopped (in a debugger, say), or end all and resume from the last checkpoint",
            self.ranks.timeout,
        )
        memory_fence()  # what is read from now on isn't older


class SharedUnit:
    """The next unit's places in the shared memory, for each kind of its own, and the share of it that this rank steps."""

    def __init__(self, store: SharedStore, layout: FlatLayout, sizes: Mapping[str, int]) -> None:
        self.ranks = store.ranks
        self.share = layout.share_of(self.ranks.rank, self.ranks.size)
        self.store, self._index = store, store.units
        store.units += 1
        self._places = {kind: (store.file.reserve(size), size) for kind, size in sizes.items()}
        self.mapped: dict[str, int] = {}
        """Bytes of the kinds of memory that were on the host at any time: they stay there, wherever the unit moves."""
        self._steps = 0

    def map(self, kind: str) -> Pages:
        """The mapping of one kind of its memory."""
        offset, size = self._places[kind]
        self.mapped[kind] = size
        return self.store.file.map(offset, size)

    def note_applied(self) -> None:
        """Called by the step worker when this rank's share has been stepped."""
        memory_fence()  # others see the weights before the number that tells of them
        self.store.steps[self.ranks.rank][self._index] += 1

    def next_step(self, name: str) -> StepOfAll:
        """The step of the unit that is about to be taken; called once for each, on every rank."""
        self._steps += 1
        return StepOfAll(self.store, self._index, self._steps, name)


class StepOfAll:
    """A step of a unit, of which every rank applies its share."""

    def __init__(self, store: SharedStore, unit: int, steps: int, name: str) -> None:
        self._rows, self._timeout = store.steps, store.ranks.timeout
        self._unit, self._steps, self._name = unit, steps, name

    @property
    def is_done(self) -> bool:
        """Whether all ranks have applied theirs."""
        return not self._late()

    def wait(self) -> None:
        """Blocks until all ranks have applied theirs. A ``RankError`` names those that didn't within ``ddp_timeout``."""
        what = f"haven't applied step {self._steps} of {self._name}"
        wait_for(self._late, what, "every process must take every step", self._timeout)

    def _late(self) -> list[int]:
        late = [rank for rank, row in enumerate(self._rows) if row[self._unit] < self._steps]
        memory_fence()  # what is read from now on isn't older
        return late


def wait_for(late: Callable[[], list[int]], what: str, why: str, timeout: datetime.timedelta) -> None:
    """Blocks until ``late`` names no rank; a ``RankError`` says of those that it names for too long ``what`` they didn't."""
    seconds, polls = timeout.total_seconds(), 0
    end = time.monotonic() + seconds
    while late_ranks := late():
        polls += 1
        if polls > _POLLS_WITHOUT_SLEEP:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > end:
                raise RankError(f"ranks {late_ranks} {what} after {seconds:.0f} s; {why}")

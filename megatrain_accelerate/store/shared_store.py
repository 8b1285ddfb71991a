"""The store of several ranks: one for all of a machine, of which each rank steps its share."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.parallel.order_check import OrderCheck
from megatrain_accelerate.parallel.ranks import Ranks, StepCounters
from megatrain_accelerate.parallel.shared_file import SharedFile
from megatrain_accelerate.store.layout import FlatLayout
from megatrain_accelerate.store.step_worker import Ticket


class SharedStore:
    """Memory and step counters of ``units`` units, mapped by all ranks. They make it, and its units, in the same order."""

    def __init__(self, ranks: Ranks, units: int) -> None:
        self.ranks = ranks
        self.file = SharedFile(ranks)
        self.counters = StepCounters(self.file.rows(ctypes.c_int64 * units), ranks)
        self.order = OrderCheck(self.file, ranks)
        self._units = 0
        self.is_loading = False
        """Whether ``load_state_dict`` may have written to weights since the last training forward: the only write that ranks
        may make to what they share, since each writes the same values."""

    def add(self, layout: FlatLayout, sizes: Mapping[str, int]) -> SharedUnit:
        """The next unit, with room for each kind of its memory."""
        self._units += 1
        return SharedUnit(self, self._units - 1, layout, sizes)


class SharedUnit:
    """One unit's places in the shared memory, and the share of it that this rank steps."""

    def __init__(self, store: SharedStore, index: int, layout: FlatLayout, sizes: Mapping[str, int]) -> None:
        self.ranks = store.ranks
        self.share = layout.share_of(self.ranks.rank, self.ranks.size)
        self._store, self._index = store, index
        self._places = {kind: (store.file.reserve(size), size) for kind, size in sizes.items()}
        self.mapped: dict[str, int] = {}
        """Bytes of the kinds of memory that were on the host at any time: they stay there, wherever the unit moves."""
        self._steps = 0

    def refuse_written(self, name: str) -> None:
        """Raises an ``UnsupportedError`` for weights that a script wrote to, unless that was ``load_state_dict``."""
        if not self._store.is_loading:
            raise UnsupportedError(
                f"weights of {name} were written to, which several processes share: each would write over what another one "
                "has written. Change weights before accelerator.prepare(), or by load_state_dict(), or set num_processes: 1"
            )

    def map(self, kind: str) -> mmap.mmap:
        """The mapping of one kind of its memory."""
        offset, size = self._places[kind]
        self.mapped[kind] = size
        return self._store.file.map(offset, size)

    def note_applied(self) -> None:
        """Called by the step worker when this rank's share has been stepped."""
        self._store.counters.count(self._index)

    def next_step(self, name: str) -> SharesOfAll:
        """The step of the unit that is about to be taken; called once for each, on every rank."""
        self._steps += 1
        return SharesOfAll(self._store.counters, self._index, self._steps, name)


class SharesOfAll:
    """A step of a unit, of which every rank applies its share."""

    def __init__(self, counters: StepCounters, unit: int, steps: int, name: str) -> None:
        self._counters, self._unit, self._steps, self._name = counters, unit, steps, name

    @property
    def are_applied(self) -> bool:
        """Whether all ranks have applied theirs."""
        return self._counters.have_reached(self._unit, self._steps)

    def wait(self) -> None:
        """Blocks until all ranks have applied theirs. A ``RankError`` where one doesn't."""
        self._counters.wait(self._unit, self._steps, self._name)


class StepOfAll(Ticket):
    """What the readers of a unit wait for: the step of this rank's share (``own``), then the others'."""

    def __init__(self, own: Ticket, of_all: SharesOfAll) -> None:
        super().__init__(own.name)
        self._own, self._of_all = own, of_all

    @property
    def is_done(self) -> bool:
        return self._own.is_done and self._of_all.are_applied

    def wait(self) -> None:
        """Blocks until the step is over. Raises ``StepWorkerError`` where that of this rank's share failed, ``RankError``
        where another rank doesn't step its own."""
        self._own.wait()
        self._of_all.wait()

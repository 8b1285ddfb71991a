"""The ranks of one machine: who they are, where they meet, what one tells the others.

Everything that must happen in the same order on all ranks goes through here or through
:mod:`~megatrain_accelerate.gradients.exchange`. With one process there is no :class:`Ranks`, and nothing of this is called.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatrain_accelerate.errors import RankError, UnsupportedError
from megatrain_accelerate.kernels.host import memory_fence

MEETING_SECONDS = 1800.0
"""How long a rank waits for another that is alive, which may be saving: ``ddp_timeout`` of the Trainer's arguments."""
_POLL_SECONDS = 50e-6
_POLLS_WITHOUT_SLEEP = 200


class Ranks:
    """This process and those that it trains with, all of one machine.

    Raises:
        UnsupportedError: they aren't all of one machine.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=MEETING_SECONDS))
        machines = len(set(self.gather(Path("/proc/sys/kernel/random/boot_id").read_text())))
        if machines > 1:
            raise UnsupportedError(
                f"megatrain trains on the GPUs of one machine, and the {self.size} processes of this training are on "
                f"{machines}; set num_machines: 1"
            )

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The ``value`` of the rank ``source``, on all ranks. Anything that can be pickled."""
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The ``value`` of each rank, in their order, on all of them. Anything that can be pickled."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, on the host, added in the order of ranks: the same bits on all of them."""
        found = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(found, values, group=self._control)
        total = found[0]
        for more in found[1:]:
            total += more
        return total

    def meet(self, where: str) -> None:
        """Returns when all ranks are here. ``where`` names the caller's place: a ``RankError`` lists places that differ."""
        places = self.gather(where)
        if len(set(places)) > 1:
            raise RankError(
                "the ranks do different things: "
                + ", ".join(f"rank {rank} is at {place!r}" for rank, place in enumerate(places))
                + "; every process must run the same script on the same model"
            )


class StepCounters:
    """How many steps of each unit each rank has applied to its share, in memory that all ranks map.

    ``rows`` has one of 64-bit integers for each rank. Writer of a rank's row: its step worker. Readers: everybody. A counter
    is written after the weights that it tells of, and fences keep others from seeing that the other way round.
    """

    def __init__(self, rows: Sequence[MutableSequence[int]], ranks: Ranks) -> None:
        self._rows, self._own = rows, rows[ranks.rank]

    def count(self, unit: int) -> None:
        """This rank has applied one more step to its share of the unit."""
        memory_fence()
        self._own[unit] += 1

    def have_reached(self, unit: int, steps: int) -> bool:
        """Whether all ranks have applied so many steps to the unit."""
        reached = all(row[unit] >= steps for row in self._rows)
        memory_fence()
        return reached

    def wait(self, unit: int, steps: int, name: str) -> None:
        """Blocks until :meth:`have_reached`. A ``RankError`` names the rank that didn't come."""
        wait_until(lambda: self.have_reached(unit, steps), lambda: self._missing(unit, steps, name))

    def _missing(self, unit: int, steps: int, name: str) -> str:
        late = [rank for rank, row in enumerate(self._rows) if row[unit] < steps]
        return f"ranks {late} haven't applied step {steps} of {name}"


def wait_until(is_so: Callable[[], bool], missing: Callable[[], str]) -> None:
    """Blocks until ``is_so()``; a ``RankError`` that says what is ``missing`` after :data:`MEETING_SECONDS`."""
    end, polls = time.monotonic() + MEETING_SECONDS, 0
    while not is_so():
        polls += 1
        if polls > _POLLS_WITHOUT_SLEEP:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > end:
                raise RankError(f"{missing()} after {MEETING_SECONDS:.0f} s; every process must take every step")

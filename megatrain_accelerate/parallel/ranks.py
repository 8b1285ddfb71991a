"""The ranks of one machine: who they are, where they meet, what one tells the others.

Everything that must happen in the same order on all ranks goes through here or through
:mod:`~megatrain_accelerate.gradients.exchange`. With one process there is no :class:`Ranks`, and nothing of this is called.
"""

from __future__ import annotations

import datetime
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatrain_accelerate.errors import RankError, UnsupportedError

MEETING_SECONDS = 1800.0
"""How long a rank waits for another that is alive, which may be saving: the default of the Trainer's ``ddp_timeout``, whose
value isn't looked at."""


class Ranks:
    """This process and those that it trains with; an ``UnsupportedError`` if they aren't all of one machine."""

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
        return functools.reduce(torch.add, found)

    def meet(self, where: str) -> None:
        """Returns when all ranks are here. ``where`` names the caller's place: a ``RankError`` lists places that differ."""
        places = self.gather(where)
        if len(set(places)) > 1:
            raise RankError(
                "the ranks do different things: "
                + ", ".join(f"rank {rank} is at {place!r}" for rank, place in enumerate(places))
                + "; every process must run the same script on the same model"
            )

    def leave(self) -> None:
        """Ends gloo's threads before the interpreter ends: a thread that frees the tensors of the last exchange later than
        that aborts the process. NCCL's group, if that is the group of all, has no such threads. Nothing can be exchanged
        afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group(None if dist.get_backend() == "gloo" else self._control)
        del self._control

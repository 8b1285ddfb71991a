"""The ranks of one machine: who they are, where they meet, what one tells the others.

Everything that must happen in the same order on all ranks goes through here, :mod:`~megatrain_accelerate.gradients.exchange`
or :mod:`~megatrain_accelerate.transfer.gather`. With one process there is no :class:`Ranks`, and nothing of this is called.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatrain_accelerate.errors import RankError, UnsupportedError

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
"""The default of the Trainer's ``ddp_timeout``. It replaces :data:`_NCCL_TIMEOUT`, torch's default for NCCL, which an
Accelerate script has that sets none: the largest checkpoints take longer than that."""
_NCCL_TIMEOUT = datetime.timedelta(minutes=10)


class Ranks:
    """The processes that train together, this one among them. Raises ``UnsupportedError`` if they are on several machines."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout = _timeout_of(dist.group.WORLD)
        """How long a rank waits for another that is alive, and may be saving: the ``ddp_timeout`` of the Trainer."""
        self.meetings, self.waits = 0, False
        """How many collectives of all ranks this one has begun, and whether it waits in one now."""
        self.place = "the beginning"
        """What this rank last passed to :meth:`meet`."""
        self._control = dist.new_group(backend="gloo", timeout=self.timeout)
        machines = len(set(self.gather(Path("/proc/sys/kernel/random/boot_id").read_text())))
        if machines > 1:
            raise UnsupportedError(
                f"megatrain trains on the GPUs of one machine, and the {self.size} processes of this training are on "
                f"{machines}; set num_machines: 1"
            )
        cpus = self.gather(os.sched_getaffinity(0))
        self.on_these_cpus = sum(not cpus[self.rank].isdisjoint(others) for others in cpus)
        """How many ranks, this one included, may run on this one's CPUs: all, unless each is bound to those near its GPU."""

    @functools.cached_property
    def weights_group(self) -> Any:
        """The communicator in which weights are gathered. In that of gradients a gather would wait for those that are still
        being computed. All ranks ask for it together. It is kept, since each takes device memory until the process ends."""
        return dist.new_group(timeout=self.timeout)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The ``value`` of the rank ``source``, on all ranks: anything that can be pickled. ``source`` gets its own."""
        box = [value]
        with self._meeting():
            dist.broadcast_object_list(box, src=source, group=self._control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The ``value`` of each rank, in rank order, on all ranks: anything that can be pickled."""
        found: list[Any] = [None] * self.size
        with self._meeting():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' host tensors, on all ranks. Added in rank order, so that it has the same bits on each."""
        found = [torch.empty_like(values) for _ in range(self.size)]
        with self._meeting():
            dist.all_gather(found, values, group=self._control)
        return functools.reduce(torch.add, found)

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Counts a collective, and tells the lifeline's thread while this rank waits in it. Only one thread may be in one."""
        self.meetings, self.waits = self.meetings + 1, True
        try:
            yield
        finally:
            self.waits = False

    def meet(self, where: str) -> None:
        """Returns when all ranks are here. ``where`` names the caller's place. Raises ``RankError`` if these differ."""
        self.place = where
        places = self.gather(where)
        if len(set(places)) > 1:
            they = ", ".join(f"rank {rank} is at {place!r}" for rank, place in enumerate(places))
            raise RankError(f"the ranks do different things: {they}; every process must run the same script on the same model")

    def leave(self) -> None:
        """Destroys the gloo group, after which nothing can be exchanged. Its threads must end before the interpreter: one that
        frees the tensors of the last exchange later aborts the process. NCCL's group, if that is the group of all, has no such
        threads."""
        if dist.is_initialized():
            dist.destroy_process_group(None if dist.get_backend() == "gloo" else self._control)
        del self._control


def _timeout_of(group: Any) -> datetime.timedelta:
    """The timeout with which the group was made, or the default if nobody set one."""
    for device in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout: datetime.timedelta = group._get_backend(torch.device(device)).options._timeout
            return _DEFAULT_TIMEOUT if timeout == _NCCL_TIMEOUT else timeout
    return _DEFAULT_TIMEOUT

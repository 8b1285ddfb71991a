"""The ranks of the training that this process is part of."""

from __future__ import annotations

import functools

import torch.distributed as dist

from megatrain_accelerate.parallel.lifeline import Lifeline
from megatrain_accelerate.parallel.ranks import Ranks


def ranks_of_run() -> Ranks | None:
    """Those of this training, or None with one process. The first call is one that all ranks make together."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return _made(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _made(world: dist.ProcessGroup) -> Ranks:
    """``world``: the group of all, which a script may end and make anew."""
    ranks = Ranks()
    Lifeline(ranks)  # its thread keeps it alive
    return ranks

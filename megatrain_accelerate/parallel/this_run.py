"""The ranks of the run that this process is part of."""

from __future__ import annotations

import functools

import torch.distributed as dist

from megatrain_accelerate.parallel.lifeline import Lifeline
from megatrain_accelerate.parallel.ranks import Ranks


def ranks_of_run() -> Ranks | None:
    """Those of this run; None with one process. The first call is one that all ranks make."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return _made()


@functools.cache
def _made() -> Ranks:
    ranks = Ranks()
    Lifeline(ranks)
    return ranks

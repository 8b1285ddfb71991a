"""Makes a large machine resemble a consumer's for rows that are marked as emulated: fewer cores, a slower link to the GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

_COPIED_BYTES = 2**28
_CYCLES = 100_000_000


def emulate(cores: int, gb_per_second: float) -> None:
    """Threads that start from now on share so many cores. Where there is a GPU, each copy of ``Tensor.copy_`` between it and
    the host takes as long as at ``gb_per_second`` (GB = 1e9 bytes): its stream waits behind it for the rest of that time.

    Raises:
        ValueError: the machine has fewer cores, or a slower link.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= cores <= len(allowed):
        raise ValueError(f"{cores} cores can't be emulated on a machine with {len(allowed)}")
    os.sched_setaffinity(0, allowed[:cores])
    if not torch.cuda.is_available():
        return
    copy = torch.Tensor.copy_
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    own_bytes = _COPIED_BYTES / _seconds(lambda: device.copy_(host, non_blocking=True))
    cycles = _CYCLES / _seconds(lambda: torch.cuda._sleep(_CYCLES))
    if own_bytes < 1e9 * gb_per_second:
        raise ValueError(f"a link of {gb_per_second:g} GB/s can't be emulated by one of {own_bytes / 1e9:.1f} GB/s")
    cycles_per_byte = cycles * (1 / (1e9 * gb_per_second) - 1 / own_bytes)

    def slowed(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied = copy(self, source, non_blocking)
        if self.is_cuda != source.is_cuda:
            torch.cuda._sleep(int(self.nbytes * cycles_per_byte))
        return copied

    torch.Tensor.copy_ = slowed  # type: ignore[method-assign, assignment]


def _seconds(work: Any) -> float:
    """Of one run on the GPU, the second of two."""
    for _ in range(2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3

"""Makes a large machine resemble a consumer's, for results that are marked as emulated: fewer cores, a slower link."""

from __future__ import annotations

import os
from typing import Any

import torch

_COPIED_BYTES, _CYCLES = 2**28, 100_000_000
"""Size of the copy and length of the sleep by which the machine's own speeds are measured."""


def emulate(cores: int, gb_per_second: float) -> None:
    """This thread, and those that it starts from now on, share so many cores. Where there is a GPU, copies between it and the
    host by ``Tensor.copy_``, as all of the plugin's are, take as long as at ``gb_per_second`` (GB = 1e9 bytes): their stream
    is held up behind each of them. Other copies are not slowed, nor is the thread that issues them.

    Raises:
        ValueError: ``cores`` is less than 1 or more than there are, or the machine's link is slower.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= cores <= len(allowed):
        raise ValueError(f"{cores} cores can't be emulated on a machine with {len(allowed)}; ask for 1 to {len(allowed)}")
    os.sched_setaffinity(0, allowed[:cores])
    if not torch.cuda.is_available():
        return
    original_copy = torch.Tensor.copy_
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    own_bytes_per_second = _COPIED_BYTES / _seconds(lambda: device.copy_(host, non_blocking=True))
    cycles_per_second = _CYCLES / _seconds(lambda: torch.cuda._sleep(_CYCLES))
    if own_bytes_per_second < 1e9 * gb_per_second:
        own = own_bytes_per_second / 1e9
        raise ValueError(f"a link of {gb_per_second:g} GB/s can't be emulated by one of {own:.1f} GB/s; ask for a slower one")
    cycles_per_byte = cycles_per_second * (1 / (1e9 * gb_per_second) - 1 / own_bytes_per_second)

    def slowed(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied = original_copy(self, source, non_blocking)
        if self.is_cuda != source.is_cuda:
            torch.cuda._sleep(int(self.nbytes * cycles_per_byte))
        return copied

    torch.Tensor.copy_ = slowed  # type: ignore[method-assign, assignment]


def _seconds(work: Any) -> float:
    """What the work takes on the GPU, the second time: the first one warms up."""
    for _ in range(2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3

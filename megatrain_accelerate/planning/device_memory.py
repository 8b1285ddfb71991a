"""What is free of a GPU's memory, and how much of it a plan counts on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch

from megatrain_accelerate.units import MIB

USABLE_SHARE_OF_DEVICE = 0.9
"""Share of the device's free memory that a plan fills: the caching allocator's blocks don't fit without gaps."""


SEGMENT_BYTES = 64 * MIB
"""What single tensors may take beyond their sizes: the caching allocator cuts small ones from pieces of 2 and of 20 MiB."""
SMALL_PAGE_BYTES = 2 * MIB
"""Of an expandable segment for tensors of up to 1 MiB (c10/core/AllocatorConfig.h)."""
LARGE_PAGE_BYTES = 20 * MIB
"""Of one for larger tensors."""


def free_bytes(device: torch.device) -> int:
    """Bytes that nobody holds: neither another process, nor another model of this one, nor an engine."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def whole_free_bytes(device: torch.device) -> int:
    """:func:`free_bytes` without the fragments between tensors, which the allocator can't give back to the driver.

    What is larger than any of them finds no room there. Of expandable segments free pages go back, of others whole segments.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    return int(torch.cuda.mem_get_info(device)[0]) + sum(map(_returnable_bytes, segments))


def _returnable_bytes(segment: Mapping[str, Any]) -> int:
    if tuple(segment["segment_pool_id"]) != (0, 0):
        return 0  # a CUDA graph's, or another pool of somebody's own
    blocks = segment["blocks"]
    free = [(block["address"] - segment["address"], block["size"]) for block in blocks if block["state"] == "inactive"]
    if not segment["is_expandable"]:
        return int(free[0][1]) if free and len(blocks) == 1 else 0
    page = SMALL_PAGE_BYTES if segment["segment_type"] == "small" else LARGE_PAGE_BYTES
    return sum(page * max(0, (offset + size) // page - math.ceil(offset / page)) for offset, size in free)


def raise_peak(device: torch.device, limit_bytes: int | None) -> None:
    """Raises the allocator's peak statistic to what could be allocated, so that Inductor tries its kernels on the device.

    To time kernels Inductor needs copies of what they overwrite. In a backward, copies that would raise the peak are made in
    pinned host memory, which torch keeps for good, and each trial crosses the link (``copy_args_to_cpu_if_needed`` in
    torch/_inductor/runtime/triton_heuristics.py): 18 GiB for a layer of gpt-oss-120b on 32,768 tokens.

    Args:
        device: a GPU whose memory statistics nobody reads until they are reset.
        limit_bytes: of the process' tensors; None for what is free.
    """
    torch.cuda.empty_cache()
    room_bytes = int(USABLE_SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[0])
    if limit_bytes is not None:
        room_bytes = min(room_bytes, limit_bytes - torch.cuda.memory_allocated(device))
    if room_bytes > 0:
        with contextlib.suppress(torch.OutOfMemoryError):  # it may lie in pieces
            torch.empty(room_bytes, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()

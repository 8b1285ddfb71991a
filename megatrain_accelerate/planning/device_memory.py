"""What is free of a GPU's memory, and how much of it a plan counts on."""

from __future__ import annotations

import contextlib

import torch

from megatrain_accelerate.units import MIB

USABLE_SHARE_OF_DEVICE = 0.9
"""Share of the device's free memory that a plan fills: the caching allocator's blocks don't fit without gaps."""


SEGMENT_BYTES = 64 * MIB
"""What single tensors may take beyond their sizes: the caching allocator cuts small ones from pieces of 2 and of 20 MiB."""


def free_bytes(device: torch.device) -> int:
    """Bytes that nobody holds: neither another process, nor another model of this one, nor an engine."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def whole_free_bytes(device: torch.device) -> int:
    """:func:`free_bytes` without the fragments between tensors, which the allocator can't give back to the driver.

    What is larger than any of them finds no room there.
    """
    return free_bytes(device) - int(torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0))


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

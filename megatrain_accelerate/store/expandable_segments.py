"""Turns on expandable segments of the CUDA caching allocator, whose freed memory serves tensors of other sizes. A plan fills
the device's memory, and gaps in segments of fixed size would be lost to batches of other lengths
(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)."""

from __future__ import annotations

import logging
import os
import sys

import torch

logger = logging.getLogger(__name__)

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that configure the allocator. If the user sets one, it decides about segments, too."""

_OURS = "expandable_segments:True"
refused: set[torch.device] = set()
"""Devices that refused expandable segments."""


def expand_segments(device: torch.device) -> bool:
    """Turns on expandable segments where that works and nobody configured the allocator. Returns whether they are on."""
    if device.type != "cuda" or sys.platform != "linux" or torch.version.cuda is None or device in refused:
        return False
    if any(os.environ.get(name) for name in ALLOCATOR_VARIABLES) or torch.cuda.get_allocator_backend() != "native":
        return False
    if settings := current_settings():
        return settings == _OURS
    configure(_OURS)
    try:
        # On a new stream, which has hardly any memory yet, so that the allocator must make a segment.
        with torch.cuda.stream(torch.cuda.Stream(device)):
            torch.empty(1, device=device)
    except torch.OutOfMemoryError:  # the setting stays: it is only memory that is missing
        return True
    except RuntimeError as error:  # a partition of a GPU may have no virtual memory management
        configure("expandable_segments:False")
        refused.add(device)
        logger.info("megatrain: the GPU's allocator keeps segments of fixed sizes (%s)", error)
        return False
    return True


def current_settings() -> str | None:
    """The allocator settings that were last set, in the environment or in code. None if torch (2.11 and before) can't tell."""
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return None if settings is None else str(settings())


def configure(settings: str) -> None:
    """Sets the allocator settings as an environment variable would."""
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (configure or torch.cuda.memory._set_allocator_settings)(settings)  # torch < 2.10 has only the latter

"""The three streams of the engine and their stand-in for a machine without a GPU.

=============== ==================================================== =============================================
stream          carries                                              overlaps
=============== ==================================================== =============================================
compute_stream  the model's own kernels; always the current stream   both copy streams
h2d_stream      weights, host to device, one copy a layer;           compute of the layer before, of the part before
                of a part of its experts one copy a parameter
d2h_stream      gradients, device to host, as many                   compute of the layer that follows in backward
=============== ==================================================== =============================================

Streams are made here only. Events live on the objects that they protect.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class ImmediateEvent:
    """Event of the CPU stand-in: work is over when it is issued, so it is always complete."""

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always complete."""
        return True

    def elapsed_time(self, end: ImmediateEvent) -> float:
        """Milliseconds between two events: none."""
        return 0.0


class ImmediateStream:
    """Stream of the CPU stand-in: a call runs where it is made."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


_NO_STREAM = contextlib.nullcontext()


class Streams:
    """The engine's streams on one device.

    Args:
        device: a CUDA device, or the CPU for the stand-in.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.h2d_stream: Any = torch.cuda.Stream(device) if self.is_cuda else ImmediateStream()
        self.d2h_stream: Any = torch.cuda.Stream(device) if self.is_cuda else ImmediateStream()

    @property
    def compute_stream(self) -> Any:
        """The current stream: whatever the caller's kernels run on."""
        return torch.cuda.current_stream(self.device) if self.is_cuda else ImmediateStream()

    def event(self, timing: bool = False) -> Any:
        """A new event, complete until it is first recorded."""
        return torch.cuda.Event(enable_timing=timing) if self.is_cuda else ImmediateEvent()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Runs the body's device work on ``stream``."""
        return torch.cuda.stream(stream) if self.is_cuda else _NO_STREAM

    def synchronize(self) -> None:
        """Blocks until everything that was issued to the device is over. Between steps only."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

"""Counters of what the engine moved and waited for. Written by the streaming parts, read by the telemetry."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from megatrain_accelerate.streaming.streams import Streams


@dataclasses.dataclass
class Counters:
    """Sums since the engine was made."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    weight_fetches: int = 0
    copy_wait_ms: float = 0.0
    """Time the compute stream stood still until a layer's weights had arrived, or a gradient slot was free."""
    optimizer_wait_ms: float = 0.0
    """Time the launching thread was blocked by the host optimizer."""
    skipped_steps: int = 0
    """Optimizer steps not taken because of a non-finite gradient norm."""


class Meter:
    """Owner of the counters. Stalls of the compute stream are measured by pairs of timing events, read when over."""

    def __init__(self, streams: Streams) -> None:
        self.counters = Counters()
        self._streams = streams
        self._pending: collections.deque[tuple[Any, Any]] = collections.deque()
        self._spare: list[tuple[Any, Any]] = []

    def compute_waits_for(self, event: Any) -> None:
        """Makes the compute stream wait for ``event`` and accounts for the stall."""
        compute_stream = self._streams.compute_stream
        if not self._streams.is_cuda:
            compute_stream.wait_event(event)
            return
        start, end = self._spare.pop() if self._spare else (self._streams.event(True), self._streams.event(True))
        start.record(compute_stream)
        compute_stream.wait_event(event)
        end.record(compute_stream)
        self._pending.append((start, end))
        if len(self._pending) > 1024:
            self.harvest()

    def harvest(self) -> None:
        """Adds up the stalls that are over, without waiting."""
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            self.counters.copy_wait_ms += start.elapsed_time(end)
            self._spare.append((start, end))

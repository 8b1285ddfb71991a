"""Counters of what the engine copied and waited for, for the telemetry, and named ranges in profiles. A pair of timing events
on the compute stream, around a wait, tells how long the GPU was idle by its own clock. If a thread is blocked while the GPU
still has kernels to run, that isn't idle time: they delay both events alike. Events are reused when they are over."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from megatrain_accelerate.store.shared_store import StepOfAll
from megatrain_accelerate.store.step_worker import Future
from megatrain_accelerate.transfer.streams import Streams

_NO_RANGE = contextlib.nullcontext()


def named_range(name: str) -> contextlib.AbstractContextManager[object]:
    """A range with this name around the body in a profile (``torch.profiler``)."""
    # ``record_function`` alone takes 6 us even while nobody profiles.
    return record_function(name) if torch.autograd._profiler_enabled() else _NO_RANGE


class Cause(str, enum.Enum):
    """What the compute stream waited for."""

    H2D = "h2d"
    """A layer's weights or activations were still being copied to the device."""
    D2H = "d2h"
    """A gradient slot, or memory of offloaded activations, was still being copied to the host."""
    HOST_STEP = "host_step"
    """The host optimizer hadn't applied a step yet."""
    BACKWARD_END = "backward_end"
    """The last gradients of a backward were still being copied to the host."""


@dataclasses.dataclass
class Counters:
    """Sums since the engine was made."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    weight_fetches: int = 0
    optimizer_wait_ms: float = 0.0
    """Time for which the host optimizer blocked the launching thread."""
    skipped_steps: int = 0
    """Optimizer steps that were skipped because of a non-finite gradient norm."""
    h2d_wait_ms: float = 0.0
    d2h_wait_ms: float = 0.0
    host_step_wait_ms: float = 0.0
    """Includes the part of a wait for a copy that an earlier step would have saved."""
    backward_end_wait_ms: float = 0.0
    h2d_copy_ms: float = 0.0
    d2h_copy_ms: float = 0.0
    """``*_copy_ms`` is the time for which the link was copying, for copies that are over."""
    h2d_copied_bytes: int = 0
    d2h_copied_bytes: int = 0
    """Bytes of the copies that ``*_copy_ms`` timed."""
    stepped_parameters: int = 0
    step_seconds: float = 0.0
    """Time for which the step worker computed, without its waits for gradients."""
    plan_seconds: float = 0.0
    """Time spent on plans in training forwards: on fake runs and measurements."""

    def add(self, cause: Cause, **amounts: float) -> None:
        """Adds each amount to the cause's counter of that name: ``wait_ms`` to ``h2d_wait_ms``, say."""
        counters = vars(self)
        for what, amount in amounts.items():
            counters[cause + "_" + what] += amount


class UpdateGate:
    """Makes readers of memory wait while the step worker uses it. With ``parts`` the gate is open if theirs are, too."""

    def __init__(self, parts: Sequence[UpdateGate] = ()) -> None:
        self._steps: Sequence[Future | StepOfAll] = ()
        self._parts = parts

    def close_until(self, *steps: Future | StepOfAll) -> None:
        self._steps = steps
        for part in self._parts:
            part.close_until(*steps)

    @property
    def is_open(self) -> bool:
        if not self._steps and not self._parts:  # asked several times a layer
            return True
        return all(step.is_done for step in self._steps) and all(part.is_open for part in self._parts)

    def wait(self) -> None:
        """Blocks until the memory is valid. Raises if this rank's step failed, or another rank doesn't take its own."""
        for step in self._steps:
            step.wait()
        self._steps = ()
        for part in self._parts:
            part.wait()


class Meter:
    """Owner of the counters and of the timing events."""

    def __init__(self, streams: Streams) -> None:
        self.counters = Counters()
        self.streams = streams
        self._pending: collections.deque[tuple[Any, Any, Callable[[float], None]]] = collections.deque()
        self._spare: list[tuple[Any, Any]] = []
        # The step worker, which copies residents, times copies beside the launching thread.
        self._lock = threading.Lock()

    def compute_waits_for(self, event: Any, cause: Cause, late_ms: float = 0.0) -> None:
        """Makes the compute stream wait for a copy's ``event``, and counts its idle time. Of that, up to ``late_ms`` count for
        the host step: the copy would have been issued that much earlier but for the step of its weights."""
        compute_stream = self.streams.compute_stream

        def add(waited_ms: float) -> None:
            by_step_ms = min(waited_ms, late_ms)
            self.counters.add(Cause.HOST_STEP, wait_ms=by_step_ms)
            self.counters.add(cause, wait_ms=waited_ms - by_step_ms)

        with _Timed(self, compute_stream, add):
            compute_stream.wait_event(event)

    def blocked_by(self, cause: Cause) -> _Timed:
        """Counts the GPU's idle time while the body blocks the launching thread."""
        return _Timed(self, self.streams.compute_stream, lambda ms: self.counters.add(cause, wait_ms=ms))

    def copying(self, direction: Cause, copied_bytes: int, beside_compute: bool = False) -> _Timed:
        """Counts and times copies that the body issues. Enter it on their stream, after that stream's waits. The step worker's
        copies are ``beside_compute``, and counted when announced. In the CPU stand-in all others block compute."""
        streams = self.streams
        holds_up = not streams.is_cuda and not beside_compute
        if not beside_compute:
            self.counters.add(direction, bytes=copied_bytes)

        def add(copy_ms: float) -> None:
            self.counters.add(direction, copied_bytes=copied_bytes, copy_ms=copy_ms, wait_ms=copy_ms if holds_up else 0.0)

        return _Timed(self, streams.h2d_stream if direction is Cause.H2D else streams.d2h_stream, add)

    def wait_for_step(self, name: str, gate: UpdateGate) -> None:
        """Blocks the launching thread until the gate is open. Counts that time, and the GPU's idle time."""
        if gate.is_open:
            gate.wait()
            return
        start = time.perf_counter()
        with self.blocked_by(Cause.HOST_STEP), named_range(f"megatrain::wait_for_step ({name})"):
            gate.wait()
        self.counters.optimizer_wait_ms += 1e3 * (time.perf_counter() - start)

    @contextlib.contextmanager
    def stepping(self, parameters: int) -> Iterator[None]:
        """Times the arithmetic of a step on ``parameters`` parameters. Entered by the thread that computes."""
        start = time.perf_counter()
        yield
        self.counters.step_seconds += time.perf_counter() - start
        self.counters.stepped_parameters += parameters

    def harvest(self) -> None:
        """Adds up the waits and copies that are over, without waiting for others."""
        with self._lock:
            for _ in range(len(self._pending)):
                start, end, add = self._pending.popleft()
                if end.query():
                    add(start.elapsed_time(end))
                    self._spare.append((start, end))
                else:
                    self._pending.append((start, end, add))


class _Timed:
    """Calls ``add`` with the milliseconds that the body took on a stream, once they are known. Faster than a generator."""

    def __init__(self, meter: Meter, stream: Any, add: Callable[[float], None]) -> None:
        self._meter = meter
        self._stream = stream
        self._add = add

    def __enter__(self) -> None:
        meter, event = self._meter, self._meter.streams.event
        with meter._lock:
            pair = meter._spare.pop() if meter._spare else None
        self._pair = pair or (event(timing=True), event(timing=True))
        self._pair[0].record(self._stream)

    def __exit__(self, *error: object) -> None:
        meter = self._meter
        self._pair[1].record(self._stream)
        with meter._lock:
            meter._pending.append((*self._pair, self._add))
        if len(meter._pending) > 4096:
            meter.harvest()

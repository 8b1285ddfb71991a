"""Records one optimizer step of a training that `megatrain trace` started. Does nothing in any other process.

Works for the Trainer and for bare Accelerate loops alike, since it follows the optimizer: its hook is called when a step is
submitted. torch's profiler records the streams and the threads that it follows; the step worker's thread isn't one of
them, so its spans are noted here, by the host's clock, and the two clocks are tied by marks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from typing import Any

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.integrations.telemetry import bound_shares, describe_bound
from megatrain_accelerate.streaming.meter import Cause, Counters
from megatrain_accelerate.tracing import CLOCK_MARK, LAUNCHER, RAW_INFO, RAW_TRACE, WORKER, TraceRequest

_CLOCK_MARKS = 8
"""Made at each end of the period: the tightest of them counts."""

_current: StepTrace | None = None


def follow(optimizer: Optimizer, engine: Engine) -> None:
    """Traces a step of this optimizer, if the process was asked to; the one that was prepared last counts.

    Raises:
        ConfigError: the request is malformed.
    """
    global _current
    request = TraceRequest.from_environment()
    if request is None or (_current is not None and _current.has_begun):
        return
    if _current is not None:
        _current.detach()
    _current = StepTrace(optimizer, engine, request)


class StepTrace:
    """Profiles the period that ends when an optimizer submits the requested step; writes it down.

    The period before it is profiled too and thrown away: a profiler's first events are slow.
    """

    def __init__(self, optimizer: Optimizer, engine: Engine, request: TraceRequest) -> None:
        self._engine, self._request = engine, request
        self._count = 0
        self._profile: profile | None = None
        self._marks_ns: list[int] = []
        self._worker_spans: list[tuple[str, int, int]] = []
        self._begin_ns = 0
        self._counters = Counters()
        handle = optimizer.register_step_pre_hook(lambda *_: self._step_begins())
        self.detach = handle.remove
        """Stops following the optimizer."""

    @property
    def has_begun(self) -> bool:
        """Whether the profiler runs, or has run."""
        return self._count >= max(1, self._request.step - 2)

    def _step_begins(self) -> None:
        self._count += 1
        if self._profile is None and self.has_begun:
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._engine.device.type == "cuda" else [])
            self._profile = profile(activities=activities)
            self._profile.start()
            self._engine.runtime.worker.on_work_done = lambda *span: self._worker_spans.append(span)
        if self._count == self._request.step - 1:
            self._mark_clock()
            self._counters = self._counters_now()
            self._begin_ns = time.perf_counter_ns()
        elif self._count == self._request.step:
            self._finish(time.perf_counter_ns())

    def _mark_clock(self) -> None:
        for _ in range(_CLOCK_MARKS):
            with record_function(CLOCK_MARK):
                self._marks_ns.append(time.perf_counter_ns())

    def _counters_now(self) -> Counters:
        meter = self._engine.runtime.meter
        meter.harvest()
        return dataclasses.replace(meter.counters)

    def _finish(self, end_ns: int) -> None:
        assert self._profile is not None
        self.detach()
        self._engine.runtime.worker.on_work_done = None
        self._mark_clock()
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self._profile.stop()
        folder = self._request.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(folder / RAW_TRACE))
        self._profile = None
        partial = folder / f"{RAW_INFO}.partial"
        partial.write_text(json.dumps(self._info(end_ns)))
        partial.rename(folder / RAW_INFO)

    def _info(self, end_ns: int) -> dict[str, Any]:
        engine, now, before = self._engine, self._counters_now(), self._counters
        names = {cause.value: f"{cause.value}_wait_ms" for cause in Cause}
        wait_ms = {cause: getattr(now, name) - getattr(before, name) for cause, name in names.items()}
        shares = bound_shares(wait_ms, (end_ns - self._begin_ns) / 1e6)
        is_cuda = engine.device.type == "cuda"
        return {
            "step": self._request.step,
            "device": torch.cuda.get_device_name(engine.device) if is_cuda else "the CPU",
            "layers": [layer.name for layer in engine.runtime.layers],
            "pid": os.getpid(),
            "threads": {LAUNCHER: threading.get_native_id(), WORKER: engine.runtime.worker.native_id},
            "begin_ns": self._begin_ns,
            "end_ns": end_ns,
            "marks_ns": self._marks_ns,
            "worker_spans": list(self._worker_spans),
            "wait_ms": wait_ms,
            "shares": shares,
            "bound": describe_bound(shares),
            "torch": torch.__version__,
        }

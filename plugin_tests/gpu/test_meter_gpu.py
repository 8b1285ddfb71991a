"""On a GPU: the GPU's idle time is counted for what it waited for, and measuring it costs nothing that matters."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.gradients import offload as grad_offload
from megatrain_accelerate.integrations.telemetry import Telemetry, bound_by
from megatrain_accelerate.optim import fused_step
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.transfer import prefetch
from megatrain_accelerate.transfer.meter import Cause, Meter
from megatrain_accelerate.transfer.streams import Streams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLEEP_CYCLES = 160_000_000  # about 80 ms: far longer than everything else in a step of the tiny models here, on busy cores too
STEPS = 6


def sleep_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, stream: str) -> None:
    """Work on ``stream`` is late by ``SLEEP_CYCLES`` before each call of ``owner.name``."""
    original = getattr(owner, name)

    def slowed(self: Any, *args: Any) -> Any:
        streams = self.streams if isinstance(self, grad_offload.GradientOffloader) else self._streams
        with streams.on(getattr(streams, stream)):
            torch.cuda._sleep(SLEEP_CYCLES)
        return original(self, *args)

    monkeypatch.setattr(owner, name, slowed)


def last_entries(slow_kernels: bool = False, **settings: Any) -> tuple[str, dict[str, float]]:
    """(what bounded, log entries) of the last steps of a short training."""
    model = tiny_model().train()
    if slow_kernels:
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_pre_hook(lambda *_: torch.cuda._sleep(SLEEP_CYCLES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model, device="cuda", kept_layers=0, **settings)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    telemetry = Telemetry(engine, model)
    entries: dict[str, float] = {}
    for step, ids in enumerate(token_batches(STEPS)):
        if step == 2:  # what is only slow the first time is over
            torch.cuda.synchronize()
            telemetry.entries()
            telemetry.pause()
        telemetry.step_begins()
        loss = model(input_ids=ids.cuda(), labels=ids.cuda()).loss
        loss.backward()
        engine.runtime.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        telemetry.step_ends()
    torch.cuda.synchronize()
    entries = telemetry.entries()
    word = bound_by(telemetry.shares)
    telemetry.close()
    engine.close()
    return word, {name.removeprefix("megatrain/"): value for name, value in entries.items()}


def test_slow_weight_copies_bound_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep_before(monkeypatch, prefetch.Prefetcher, "fill", "h2d_stream")
    word, entries = last_entries()
    assert word == "h2d", entries
    # Both are sums of the same events' times, in other groups: half a microsecond each.
    assert entries["copy_wait_ms"] >= 0.999 * entries["gpu_wait_h2d_ms"] > 20.0


def test_slow_gradient_copies_bound_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep_before(monkeypatch, grad_offload.GradientOffloader, "send", "d2h_stream")
    monkeypatch.setattr(grad_offload, "GRADIENT_SLOTS", 1)
    word, entries = last_entries()
    assert word == "d2h", entries
    assert entries["gpu_wait_d2h_ms"] > 20.0
    assert entries["gpu_wait_backward_end_ms"] > 5.0, "the last layer's copy has nothing to hide under"


def test_slow_kernels_bound_the_step_by_compute() -> None:
    word, entries = last_entries(slow_kernels=True)
    assert word == "compute", entries
    assert entries["bound_share_compute"] > 0.8, "a thread that waits for a busy GPU is no idle GPU"


def test_a_slow_host_step_bounds_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = fused_step.step_segments

    def slow_apply(*args: Any) -> None:
        time.sleep(0.02)
        apply(*args)

    monkeypatch.setattr(fused_step, "step_segments", slow_apply)
    word, entries = last_entries()
    assert word == "host_step", entries
    assert entries["gpu_wait_host_step_ms"] > 40.0


def test_a_host_step_under_queued_kernels_is_not_waited_for() -> None:
    streams = Streams(torch.device("cuda"))
    meter = Meter(streams)
    torch.cuda._sleep(20 * SLEEP_CYCLES)
    with meter.blocked_by(Cause.HOST_STEP):
        time.sleep(0.1)  # the GPU sleeps longer
    torch.cuda.synchronize()
    meter.harvest()
    assert meter.counters.host_step_wait_ms < 5.0
    with meter.blocked_by(Cause.HOST_STEP):
        time.sleep(0.1)
    torch.cuda.synchronize()
    meter.harvest()
    assert meter.counters.host_step_wait_ms > 90.0


def test_the_links_speed_is_that_of_a_plain_copy() -> None:
    streams = Streams(torch.device("cuda"))
    meter = Meter(streams)
    host = torch.empty(256 * 2**20, dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before = 0.0
    for measure in (False, True):
        with streams.on(streams.h2d_stream):
            begin.record()
            with meter.copying(Cause.H2D, host.numel()):
                device.copy_(host, non_blocking=True)
            end.record()
        torch.cuda.synchronize()
        if measure:
            before = meter.counters.h2d_copy_ms
        meter.harvest()
    assert meter.counters.h2d_copied_bytes == 2 * host.numel()
    # The outer pair has the two inner records in it besides the copy, a few microseconds.
    assert meter.counters.h2d_copy_ms - before == pytest.approx(begin.elapsed_time(end), rel=0.05)


def test_measuring_waits_costs_little_of_the_launching_thread() -> None:
    streams = Streams(torch.device("cuda"))
    meter = Meter(streams)
    event = streams.event()
    for _ in range(100):
        meter.compute_waits_for(event, Cause.H2D)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        meter.compute_waits_for(event, Cause.H2D)
    # A layer of a model that is worth streaming takes a millisecond and more; about 15 us are usual.
    assert (time.perf_counter() - start) / 1000 < 100e-6

"""Counters of waits, copies and steps: what counts for which cause, and what the logs make of it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from megatrain_accelerate.integrations.telemetry import bound_by, bound_shares, describe_bound
from megatrain_accelerate.store.step_worker import Future
from megatrain_accelerate.transfer.meter import Cause, Counters, Meter, UpdateGate
from megatrain_accelerate.transfer.streams import Streams


class DeviceClock:
    """A device whose time is set by hand; events take the time when they are recorded, and are over up to ``done``."""

    is_cuda = True
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.now = 0.0
        self.done = float("inf")
        self.made = 0
        self.h2d_stream = self.d2h_stream = self.compute_stream = self

    def event(self, timing: bool = False) -> Any:
        assert timing, "an untimed event can't tell a time"
        self.made += 1
        return DeviceEvent(self)

    def wait_event(self, event: float) -> None:
        self.now += event


class DeviceEvent:
    """A timing event of :class:`DeviceClock`."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.at = -1.0

    def record(self, stream: DeviceClock) -> None:
        self.at = stream.now

    def query(self) -> bool:
        return self.at <= self._clock.done

    def elapsed_time(self, end: DeviceEvent) -> float:
        return end.at - self.at


@pytest.fixture
def clock() -> DeviceClock:
    return DeviceClock()


@pytest.fixture
def meter(clock: DeviceClock) -> Meter:
    return Meter(clock)  # type: ignore[arg-type]


def test_waits_count_for_their_cause(meter: Meter, clock: DeviceClock) -> None:
    meter.compute_waits_for(5.0, Cause.H2D)  # the clock's streams are moved on by what they wait for
    meter.compute_waits_for(3.0, Cause.D2H)
    meter.compute_waits_for(2.0, Cause.H2D)
    with meter.blocked_by(Cause.BACKWARD_END):
        clock.now += 7.0
    meter.harvest()
    found = meter.counters
    assert (found.h2d_wait_ms, found.d2h_wait_ms, found.backward_end_wait_ms) == (7.0, 3.0, 7.0)


def test_a_copys_wait_counts_for_the_step_that_delayed_it_and_no_further(meter: Meter) -> None:
    meter.compute_waits_for(5.0, Cause.H2D, late_ms=2.0)
    meter.compute_waits_for(5.0, Cause.H2D, late_ms=60.0)
    meter.harvest()
    assert (meter.counters.host_step_wait_ms, meter.counters.h2d_wait_ms) == (7.0, 3.0)


def test_a_blocked_thread_is_no_idle_device_while_kernels_are_queued(meter: Meter) -> None:
    # The clock is the device's: it had work all the while, so nothing passed between the two events.
    with meter.blocked_by(Cause.HOST_STEP):
        time.sleep(0.01)
    meter.harvest()
    assert meter.counters.host_step_wait_ms == 0.0


def test_an_applied_step_costs_no_events(meter: Meter, clock: DeviceClock) -> None:
    gate = UpdateGate()
    meter.wait_for_step("a layer", gate)
    assert clock.made == 0
    future = Future("step")
    gate.close_until(future)
    threading.Timer(0.01, future.finish).start()
    meter.wait_for_step("a layer", gate)
    assert clock.made == 2


def test_events_are_used_again_and_those_that_are_not_over_are_left(meter: Meter, clock: DeviceClock) -> None:
    for _ in range(5):
        meter.compute_waits_for(1.0, Cause.H2D)
        meter.harvest()
    assert clock.made == 2
    clock.done = clock.now
    meter.compute_waits_for(4.0, Cause.H2D)
    meter.harvest()
    assert meter.counters.h2d_wait_ms == 5.0
    clock.done = clock.now
    meter.harvest()
    assert meter.counters.h2d_wait_ms == 9.0


def test_events_do_not_pile_up_in_a_run_that_never_logs(meter: Meter, clock: DeviceClock) -> None:
    for _ in range(10_000):
        meter.compute_waits_for(1.0, Cause.D2H)
    assert clock.made <= 2 * 4100


def test_copies_are_timed_by_the_link(meter: Meter, clock: DeviceClock) -> None:
    with meter.copying(Cause.H2D, 1000):
        clock.now += 4.0
    with meter.copying(Cause.D2H, 500):
        clock.now += 1.0
    meter.harvest()
    found = meter.counters
    assert (found.h2d_copied_bytes, found.h2d_copy_ms) == (1000, 4.0)
    assert (found.d2h_copied_bytes, found.d2h_copy_ms) == (500, 1.0)
    assert found.h2d_wait_ms == found.d2h_wait_ms == 0.0


def test_the_stand_ins_copies_hold_up_compute_unless_the_worker_makes_them() -> None:
    meter = Meter(Streams(torch.device("cpu")))
    with meter.copying(Cause.H2D, 8):
        time.sleep(0.01)
    meter.harvest()
    assert meter.counters.h2d_wait_ms == meter.counters.h2d_copy_ms >= 10.0
    with meter.copying(Cause.H2D, 8, beside_compute=True):
        time.sleep(0.01)
    meter.harvest()
    assert meter.counters.h2d_wait_ms < meter.counters.h2d_copy_ms


def waits(**changes: float) -> dict[str, float]:
    return {**{cause.value: 0.0 for cause in Cause}, **changes}


@pytest.mark.parametrize(
    ("waited", "word"),
    [
        (waits(), "compute"),
        (waits(h2d=40.0, d2h=5.0), "compute"),
        (waits(h2d=60.0), "h2d"),
        (waits(d2h=30.0, backward_end=25.0), "d2h"),
        (waits(host_step=70.0, h2d=20.0), "host_step"),
    ],
)
def test_the_largest_share_of_a_step_bounds_it(waited: dict[str, float], word: str) -> None:
    shares = bound_shares(waited, 100.0)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert bound_by(shares) == word
    assert describe_bound(shares).startswith(f"is bound by {word} ({word} ")


def test_waits_of_an_earlier_step_make_no_negative_share() -> None:
    shares = bound_shares(waits(h2d=150.0, host_step=50.0), 100.0)
    assert shares == {"compute": 0.0, "h2d": 0.75, "d2h": 0.0, "host_step": 0.25}


def test_counters_begin_at_nothing() -> None:
    assert all(value == 0 for value in vars(Counters()).values())

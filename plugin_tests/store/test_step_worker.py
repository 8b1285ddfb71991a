"""The thread that steps: order, waiting, failure, and its end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from megatrain_accelerate.errors import StepWorkerError
from megatrain_accelerate.store.step_worker import Future, StepWorker

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def worker() -> Iterator[StepWorker]:
    made = StepWorker("test-step-worker")
    yield made
    made.close()


def fail() -> None:
    raise ArithmeticError("too much")


def test_work_runs_in_the_order_of_submission_in_one_named_thread(worker: StepWorker) -> None:
    seen: list[tuple[int, str]] = []
    for index in range(200):
        worker.submit(f"work {index}", lambda index=index: seen.append((index, threading.current_thread().name)))
    worker.drain()
    assert seen == [(index, "test-step-worker") for index in range(200)]


def test_submit_returns_before_the_work_is_done_and_wait_after(worker: StepWorker) -> None:
    go = threading.Event()
    future = worker.submit("wait", lambda: go.wait() and None)
    assert not future.is_done
    go.set()
    future.wait()
    assert future.is_done
    future.wait()  # again


def test_drain_waits_for_the_last_and_needs_no_work(worker: StepWorker) -> None:
    worker.drain()
    done: list[int] = []
    for index in range(3):
        worker.submit("slow", lambda index=index: time.sleep(0.02) or done.append(index))
    worker.drain()
    assert done == [0, 1, 2]


def test_a_failure_reaches_every_waiter_with_its_cause(worker: StepWorker) -> None:
    go = threading.Event()
    good = worker.submit("good", lambda: go.wait() and None)
    bad = worker.submit("bad", fail)
    ran: list[int] = []
    behind = worker.submit("behind", lambda: ran.append(1))
    go.set()
    good.wait()
    for wait, name in ((bad.wait, "bad"), (behind.wait, "behind"), (worker.drain, "behind"), (worker.raise_if_failed, "next")):
        with pytest.raises(StepWorkerError, match=rf"{name}.*ArithmeticError: too much.*last checkpoint") as raised:
            wait()
        assert isinstance(raised.value.__cause__, ArithmeticError)
    assert not ran, "work behind a failure must not be built upon it"
    good.wait()  # what was done before stays done


def test_nothing_can_be_submitted_after_a_failure(worker: StepWorker) -> None:
    with pytest.raises(StepWorkerError):
        worker.submit("bad", fail).wait()
    with pytest.raises(StepWorkerError) as raised:
        worker.submit("more", lambda: None)
    assert isinstance(raised.value.__cause__, ArithmeticError)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_errors_that_are_no_exceptions_are_not_lost_either(worker: StepWorker, error: type[BaseException]) -> None:
    def raise_it() -> None:
        raise error

    with pytest.raises(StepWorkerError) as raised:
        worker.submit("bad", raise_it).wait()
    assert isinstance(raised.value.__cause__, error)


def test_many_threads_may_wait_for_a_failure(worker: StepWorker) -> None:
    go = threading.Event()
    future = worker.submit("bad", lambda: go.wait() and fail())
    causes: list[BaseException | None] = []

    def wait() -> None:
        try:
            future.wait()
        except StepWorkerError as error:
            causes.append(error.__cause__)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert len(causes) == 8
    assert len({id(cause) for cause in causes}) == 1


def test_close_finishes_what_is_queued_ends_the_thread_and_can_be_called_twice() -> None:
    worker = StepWorker("closing-step-worker")
    done: list[int] = []
    for index in range(5):
        worker.submit("slow", lambda index=index: time.sleep(0.01) or done.append(index))
    worker.close()
    worker.close()
    assert done == [0, 1, 2, 3, 4]
    assert not any(thread.name == "closing-step-worker" for thread in threading.enumerate())
    worker.drain()
    with pytest.raises(StepWorkerError, match=r"thread was closed; 'late' can't be run"):
        worker.submit("late", lambda: None)


def test_close_ends_a_worker_that_failed() -> None:
    worker = StepWorker("failed-step-worker")
    worker.submit("bad", fail)
    worker.submit("behind", lambda: None)
    worker.close()
    assert not any(thread.name == "failed-step-worker" for thread in threading.enumerate())
    with pytest.raises(StepWorkerError):
        worker.drain()


def test_the_worker_lets_go_of_work_that_is_done(worker: StepWorker) -> None:
    class Heavy:
        """Stands for device memory in a closure."""

    heavy = Heavy()
    gone = weakref.ref(heavy)
    worker.submit("heavy", lambda heavy=heavy: None)
    del heavy
    worker.drain()
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # the future is finished a moment before the thread drops its references
        gc.collect()
    assert gone() is None


def test_a_future_of_no_worker_waits_until_it_is_finished() -> None:
    future = Future("alone")
    threading.Timer(0.02, future.finish).start()
    future.wait()
    assert future.is_done


def test_nothing_that_a_watch_called_is_under_way_when_it_has_ended(worker: StepWorker) -> None:
    calls, is_under_way = [], threading.Event()

    def look() -> None:
        is_under_way.set()
        time.sleep(0.05)
        calls.append(is_under_way.clear())

    worker.watch(look)
    assert is_under_way.wait(10)
    worker.watch(None)
    assert not is_under_way.is_set()
    done = len(calls)
    time.sleep(0.05)
    assert done == len(calls) > 0


def test_a_failure_of_what_a_watch_called_is_raised_to_who_waits(worker: StepWorker) -> None:
    failed = threading.Event()

    def look() -> None:
        failed.set()
        raise ValueError("while idle")

    worker.watch(look)
    assert failed.wait(10)
    worker.watch(None)
    with pytest.raises(StepWorkerError, match="while idle"):
        worker.drain()

"""The host thread that runs optimizer work in order, and the futures on which other threads wait for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from megatrain_accelerate.errors import StepWorkerError

_IDLE_SECONDS = 0.01


class Future:
    """The completion of one submitted task, on which other threads wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_done = False
        self._cause: BaseException | None = None
        # A lock does all that is needed of a ``threading.Event``, and is faster.
        self._until_done = threading.Lock()
        self._until_done.acquire()

    def finish(self, cause: BaseException | None = None) -> None:
        self._cause = cause
        self.is_done = True
        self._until_done.release()

    def wait_until_over(self) -> None:
        """Blocks until the task is over, whether it succeeded or failed."""
        if not self.is_done:
            with self._until_done:
                pass

    def wait(self) -> None:
        """Blocks until the task is over. Raises a ``StepWorkerError`` if it, or a task before it, failed."""
        self.wait_until_over()
        if self._cause is not None:
            raise StepWorkerError(
                f"the host optimizer failed before or in {self.name!r}: {type(self._cause).__name__}: {self._cause}. "
                "Weights after this step are not valid; resume from the last checkpoint"
            ) from self._cause


class StepWorker:
    """One named thread with one queue, which orders all writes to the host store. After a failure no queued task runs, and
    every waiter gets the first cause: nobody may build upon half a step."""

    def __init__(self, name: str = "megatrain-step-worker") -> None:
        self._queue: queue.SimpleQueue[tuple[Future, Callable[[], None]] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._last_future = Future("nothing")
        self._last_future.finish()
        self.on_work_done: Callable[[str, int, int], None] | None = None
        """Called by the thread after each task with its name, start and end (``perf_counter_ns``)."""
        self._when_idle: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        # When the worker itself uses watched parameters, that must not wait for the worker.
        with torch._C.DisableTorchFunctionSubclass():
            while True:
                when_idle = self._when_idle
                try:
                    item = self._queue.get(timeout=None if when_idle is None else _IDLE_SECONDS)
                except queue.Empty:
                    if when_idle is not None:
                        self._do(when_idle)
                    continue
                if item is None:
                    return
                future, work = item
                if self._failure is None:
                    start_ns = time.perf_counter_ns()
                    self._do(work)
                    if (observer := self.on_work_done) is not None:
                        observer(future.name, start_ns, time.perf_counter_ns())
                future.finish(self._failure)
                del item, future, work  # a closure may hold device memory

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.fail(error)

    def watch(self, when_idle: Callable[[], None] | None) -> None:
        """Makes the thread call ``when_idle`` every few milliseconds while it has nothing to do. None ends that. When this
        returns, no call of the function before is under way."""
        self._when_idle = when_idle
        if not self._closed:  # a closed thread runs nothing any more
            future = Future("a watch")
            self._queue.put((future, lambda: None))
            future.wait_until_over()

    @property
    def is_idle(self) -> bool:
        return self._last_future.is_done

    def submit(self, name: str, work: Callable[[], None]) -> Future:
        """Queues ``work``. Raises a ``StepWorkerError`` if earlier work failed or the worker is closed."""
        self.raise_if_failed()
        if self._closed:
            raise StepWorkerError(f"the host optimizer's thread was closed; {name!r} can't be run")
        self._last_future = future = Future(name)
        self._queue.put((future, work))
        return future

    def fail(self, cause: BaseException) -> None:
        """Notes a failure, from the thread or from outside of it. Only the first one counts."""
        if self._failure is None:
            self._failure = cause

    def raise_if_failed(self) -> None:
        """Raises a ``StepWorkerError`` if work failed, with the original exception as ``__cause__``."""
        if self._failure is not None:
            future = Future("the next step")
            future.finish(self._failure)
            future.wait()

    def drain(self) -> None:
        """Blocks until everything submitted is over. Raises as :meth:`raise_if_failed` does."""
        self._last_future.wait()
        self.raise_if_failed()

    def close(self) -> None:
        """Finishes queued work and ends the thread. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self.thread.join()

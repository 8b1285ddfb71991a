"""What a simulated step is done by: resources that do one thing at a time, two of which get in each other's way.

The host's optimizer and the copies over the link share the host's memory. The optimizer has the better of it: while it steps,
copies go at a share of their speed. That the step gets slower is in its measured speed (``machine.py``).
"""

from __future__ import annotations

import collections


class Resource:
    """Does one thing at a time."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy = 0.0
        """Seconds at work so far."""

    def work(self, seconds: float, not_before: float = 0.0) -> float:
        """Queues work; returns when it is over."""
        self.free_at = max(self.free_at, not_before) + seconds
        self.busy += seconds
        return self.free_at


class HostOptimizer(Resource):
    """A resource that remembers when it was at work."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: collections.deque[tuple[float, float]] = collections.deque()

    def work(self, seconds: float, not_before: float = 0.0) -> float:
        start = max(self.free_at, not_before)
        end = super().work(seconds, not_before)
        if self._spans and self._spans[-1][1] == start:
            start = self._spans.pop()[0]
        self._spans.append((start, end))
        return end

    def forget_before(self, moment: float) -> None:
        """Nothing that begins before ``moment`` is asked for any more."""
        while self._spans and self._spans[0][1] <= moment:
            self._spans.popleft()

    def end_beside(self, start: float, seconds: float, share: float) -> float:
        """When something is over that begins at ``start``.

        Args:
            start: in seconds.
            seconds: what it takes alone.
            share: its speed while the optimizer is at work, as a share of that alone.
        """
        now, left = start, seconds
        for begin, end in self._spans:
            if end <= now:
                continue
            if now + left <= begin:
                break
            left -= max(0.0, begin - now)
            now = max(now, begin)
            done = (end - now) * share
            if left <= done:
                return now + left / share
            left -= done
            now = end
        return now + left


class Link(Resource):
    """One direction of the link.

    Args:
        bytes_per_second: while the optimizer isn't at work.
        share: of that, what is left while it is.
        optimizer: what shares the host's memory with the copies.
    """

    def __init__(self, bytes_per_second: float, share: float, optimizer: HostOptimizer) -> None:
        super().__init__()
        self._bytes_per_second, self._share, self._optimizer = bytes_per_second, share, optimizer

    def seconds(self, size_bytes: int) -> float:
        """What a copy takes alone."""
        return size_bytes / self._bytes_per_second

    def copy(self, size_bytes: int, not_before: float = 0.0) -> float:
        """Queues a copy; returns when it is over."""
        start = max(self.free_at, not_before)
        return self.work(self._optimizer.end_beside(start, self.seconds(size_bytes), self._share) - start, start)

"""What a simulated step is done by: resources that do one thing at a time, and some of which get in each other's way.

The host's optimizer and the copies over the link share the host's memory. The optimizer has the better of it: while it steps,
copies go at a share of their speed (``machine.py`` measures it, and takes a fixed tenth off the optimizer's).
"""

from __future__ import annotations

import collections
from collections.abc import Hashable


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
    """Remembers when it was at work."""

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
        """When something is over that begins at ``start``, takes ``seconds`` alone and goes at a ``share``
        of its speed while the optimizer is at work."""
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
    """One direction of the link, at a ``share`` of its speed while the optimizer is at work."""

    def __init__(self, bytes_per_second: float, share: float, optimizer: HostOptimizer) -> None:
        super().__init__()
        self._bytes_per_second, self._share, self._optimizer = bytes_per_second, share, optimizer

    def copy_between(self, size_bytes: int, start: float) -> float:
        """A copy that finds its place between queued ones: it takes the link's time, and waits for none."""
        end = self._optimizer.end_beside(start, size_bytes / self._bytes_per_second, self._share)
        self.busy += end - start
        return end

    def copy(self, size_bytes: int, not_before: float = 0.0) -> float:
        """Queues a copy; returns when it is over."""
        start = max(self.free_at, not_before)
        end = self._optimizer.end_beside(start, size_bytes / self._bytes_per_second, self._share)
        return self.work(end - start, start)


class Slots:
    """Slots for weights, which take turns: each is free when what used it last has computed."""

    def __init__(self, count: int, link: Link) -> None:
        self._link = link
        self._users: collections.deque[tuple[Hashable, float]] = collections.deque(maxlen=count)

    def filled_at(self, holder: Hashable, size_bytes: int, not_before: float) -> float:
        """When the holder's weights are in a slot, the copy queued if they aren't yet; 0 if they are."""
        if any(held == holder for held, _ in self._users):
            return 0.0
        free_at = self._users[0][1] if len(self._users) == self._users.maxlen else 0.0
        return self._link.copy(size_bytes, max(not_before, free_at))

    def use(self, holder: Hashable, until: float) -> None:
        others = [user for user in self._users if user[0] != holder]
        self._users.clear()
        self._users.extend([*others, (holder, until)])

    def forget(self) -> None:
        """All slots are stale."""
        self._users.clear()

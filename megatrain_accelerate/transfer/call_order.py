"""The order in which layers run, learned from their calls, which tells what to fetch next."""

from __future__ import annotations

import weakref
from collections.abc import Sequence


class OpenForward:
    """A mark of one forward pass that lives as long as its graph, since only the graph's calls hold it."""


class Tape:
    """The layer calls of one forward pass, by index, which ``order`` predicts. Each call knows its position on the tape."""

    def __init__(self, order: CallOrder) -> None:
        self.order = order
        self.calls: list[int] = []
        self._open_forward: weakref.ref[OpenForward] | None = None

    def forward_mark(self) -> OpenForward:
        """The mark that tells whether the graph of a call is alive. It is the same for all calls of the pass."""
        if self._open_forward is None or (found := self._open_forward()) is None:
            self._open_forward = weakref.ref(found := OpenForward())
        return found


class CallOrder:
    """Predicts the next layers from the last complete forward pass, and before the first one by index. A wrong prediction
    costs a copy, never a result.

    A new pass begins when the first layer of the current one runs again, unless it is the only layer. Parts of layers have an
    order of their own, since a layer may call them several times. Their pass begins with a pass of the layers, whose order is
    the ``leader``. Passes that all ranks make ``together`` have an order of their own, which is the same on all ranks.
    """

    def __init__(self, layer_count: int, leader: CallOrder | None = None, together: bool = False) -> None:
        self.together = together
        self._expected = list(range(layer_count))
        self._is_only_layer = layer_count == 1 and leader is None
        self._tape = Tape(self)
        self._ended = False
        self._leader = leader
        self._led_by: Tape | None = None

    def record(self, index: int) -> tuple[Tape, int]:
        """Notes a forward call. Returns the tape of its pass and the call's position on it."""
        calls, leading = self._tape.calls, None if self._leader is None else self._leader._tape
        if leading is not None:
            begins = self._led_by is not leading
        else:
            begins = self._ended or (bool(calls) and calls[0] == index and not self._is_only_layer)
        if begins or not calls:
            self._ended = False
            self._expected = calls or self._expected
            self._tape, self._led_by = Tape(self), leading
            calls = self._tape.calls
        calls.append(index)
        return self._tape, len(calls) - 1

    def end_pass(self) -> None:
        """Makes the next call begin a new pass, whichever layer it is (a backward ended, a forward of the model begins)."""
        self._ended = True

    def after_forward(self, tape: Tape, position: int, count: int, backward_follows: bool) -> Sequence[int]:
        """Indices of the layers that are expected after the forward call at ``position``, nearest first, at most ``count``."""
        index = tape.calls[position]
        try:
            place = position if self._expected[position] == index else self._expected.index(index)
        except (IndexError, ValueError):
            return ()
        following = self._expected[place + 1 : place + 1 + count]
        if len(following) < count:
            # The end of the pass: backward starts with the layers that ran last, evaluation with the first.
            turn = tape.calls[::-1] if backward_follows else self._expected
            following = following + list(turn[: count - len(following)])
        return following

    def after_backward(self, tape: Tape, position: int, count: int, forward_follows: bool) -> Sequence[int]:
        """Indices of the layers that are expected after the backward of the call at ``position``, as :meth:`after_forward`."""
        following = tape.calls[max(0, position - count) : position][::-1]
        if len(following) < count and forward_follows:
            following = following + tape.calls[: count - len(following)]
        return following

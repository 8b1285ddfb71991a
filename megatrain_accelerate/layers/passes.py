"""The forwards and backwards of a model that are under way: which layer comes next, and whose backward is still to come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable

from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.resident import ResidentGroup
from megatrain_accelerate.layers.watched_parameters import Watch
from megatrain_accelerate.transfer.call_order import CallOrder, OpenForward, Tape
from megatrain_accelerate.transfer.parts import Streamed
from megatrain_accelerate.transfer.prefetch import Prefetcher


class _EndOfBackward:
    """Autograd calls this when a backward is over, and drops it uncalled when one has failed."""

    def __init__(self, on_end: Callable[[int, bool], None], task: int) -> None:
        self._on_end, self._task, self._was_called = on_end, task, False

    def __call__(self) -> None:
        self._was_called = True
        try:
            self._on_end(self._task, True)
        except BaseException:
            self._on_end(self._task, False)  # again, on purpose: takes back what the first call didn't complete
            raise

    def __del__(self) -> None:
        if not self._was_called:
            self._on_end(self._task, False)


class Passes:
    """Follows the calls of a model's layers, and predicts the next ones. A backward ends the ``watch`` for reads of outdated
    parameters. When it is over ``on_end`` gets its number (that of autograd's graph task) and whether it succeeded."""

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        groups: Sequence[ResidentGroup],
        prefetcher: Prefetcher,
        offloader: GradientOffloader,
        watch: Watch,
        on_end: Callable[[int, bool], None],
    ) -> None:
        self.order = CallOrder(len(layers))
        self._order_of_all = CallOrder(len(layers), together=True)
        """The order of layer calls in passes in which all ranks *together* gather each layer's weights. ``order`` has that of
        other passes."""
        self.is_together = False
        """Whether the forward in progress is such a pass. :meth:`.StreamingRuntime.end_forward` resets it."""
        self._last_layer, self._groups = layers[-1], groups
        self._prefetcher, self._offloader, self._watch, self._on_end = prefetcher, offloader, watch, on_end
        self._task: int | None = None
        """Autograd's number of the backward that is under way."""
        self._tape: Tape | None = None
        """The tape (the layer calls) of the forward whose layers that backward fetches."""
        self.open_forwards: weakref.WeakSet[OpenForward] = weakref.WeakSet()
        """Forward passes whose graph is alive and whose backward is still to come."""
        self._reached_forwards: weakref.WeakSet[OpenForward] = weakref.WeakSet()

    def begin_forward(self) -> None:
        """Called when a forward of the whole model begins: the next call of a layer begins a new pass."""
        for order in (self.order, self._order_of_all):
            order.end_pass()

    def begin_together(self) -> None:
        """Marks this forward as one in which all ranks gather weights together, and has them gather those residents that are
        used before the last layer has run (embeddings)."""
        self.is_together = True
        self._gather([group for group in self._groups if group.layers_before <= self._last_layer.index])

    def _gather(self, groups: Sequence[ResidentGroup]) -> None:
        if self._prefetcher.gather is not None:
            self._prefetcher.issue_all()
            for group in groups:
                group.gather(self._prefetcher.gather)

    def record(self, layer: StreamedLayer) -> tuple[Tape, int, OpenForward]:
        """Notes a call with a graph. Returns its pass's tape, its position there, and the forward's mark. Only the graph must
        keep the mark: the forward is open as long as it lives."""
        tape, position = (self._order_of_all if self.is_together else self.order).record(layer.index)
        open_forward = tape.forward_mark()
        self.open_forwards.add(open_forward)
        return tape, position, open_forward

    def wait_for_head(self, layer: StreamedLayer) -> None:
        """Called before each layer, and acts before the last one: brings all residents' weights up to date, since some code
        (Liger, TRL) reads the head's weight without calling the head."""
        if layer is self._last_layer:
            if self.is_together:
                self._gather(self._groups)
            for group in self._groups:
                group.wait_for_step()

    def begin_backward_of(self, tape: Tape, position: int) -> Sequence[int]:
        """Notes that a call's backward asks for weights. Returns the indices of the layers that are expected after it."""
        self._tape = tape
        if tape.order.together:
            self._prefetcher.let_go()  # a rank that holds layers since an evaluation would choose other slots than the rest
        self._reached_forwards.add(tape.forward_mark())
        forward_follows = not self._offloader.is_last_backward()  # otherwise a step follows, and changes the weights
        return tape.order.after_backward(tape, position, self._prefetcher.look_ahead, forward_follows)

    def note_backward(self, of_forward: OpenForward | None = None, *_gradients: torch.Tensor) -> None:
        """Called by hooks, often many times in a backward: notes the forward that it has reached, if the hook knows. The first
        call in a backward has autograd call :class:`_EndOfBackward`."""
        if of_forward is not None:
            self._reached_forwards.add(of_forward)
        task = torch._C._current_graph_task_id()
        if task != self._task:  # ``_task`` may still be that of a backward that raised
            self._watch.end()
            self._task = task
            Variable._execution_engine.queue_callback(_EndOfBackward(self._on_end, task))

    def end_backward(self, task: int, succeeded: bool) -> None:
        """Called when a backward is over. If it succeeded, the forwards that it reached are no longer open, and its pass ends.
        If it raised, they stay open; a late report of that doesn't end the backward that is under way by now."""
        if succeeded:
            self.open_forwards -= self._reached_forwards
            (self.order if self._tape is None else self._tape.order).end_pass()
            self._tape = None
        if succeeded or self._task == task:
            self._reached_forwards.clear()
            self._task = None

    def is_only_call(self, layer: Streamed) -> bool:
        """Whether the layer's gradients can come from one call only: the forward whose backward fetches layers has called it
        once, and no other forward is open."""
        return self._tape is not None and self._tape.calls.count(layer.index) == 1 and len(self.open_forwards) <= 1

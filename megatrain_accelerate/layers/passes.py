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
            self._on_end(self._task, False)
            raise

    def __del__(self) -> None:
        if not self._was_called:
            self._on_end(self._task, False)


class Passes:
    """Follows the calls of a model's layers, and predicts the next ones. The ``watch`` ends when a backward begins. ``on_end``
    is called with autograd's number of a backward that has ended, and whether it succeeded."""

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        groups: Sequence[ResidentGroup],
        prefetcher: Prefetcher,
        offloader: GradientOffloader,
        watch: Watch,
        on_end: Callable[[int, bool], None],
    ) -> None:
        self.order, self._order_of_all = (CallOrder(len(layers), together=together) for together in (False, True))
        """The order of what this rank may do alone, and that of passes that all ranks make together."""
        self.is_together = False
        """Whether all ranks gather weights in the forward in progress."""
        self._last_layer, self._groups = layers[-1], groups
        self._prefetcher, self._offloader, self._watch, self._on_end = prefetcher, offloader, watch, on_end
        self._task: int | None = None
        """Autograd's number of the backward that is under way."""
        self._tape: Tape | None = None
        """The tape of the forward to which that backward belongs."""
        self.open: weakref.WeakSet[OpenForward] = weakref.WeakSet()
        """Forward passes whose backward is still to come."""
        self._in_this_backward: weakref.WeakSet[OpenForward] = weakref.WeakSet()

    def begin_forward(self) -> None:
        """Called when a forward of the whole model begins: the next call of a layer begins a new pass."""
        for order in (self.order, self._order_of_all):
            order.end_pass()

    def begin_together(self) -> None:
        """Has all ranks gather weights in this forward, first those of residents before the layers."""
        self.is_together = True
        self._gather([group for group in self._groups if group.layers_before <= self._last_layer.index])

    def _gather(self, groups: Sequence[ResidentGroup]) -> None:
        if self._prefetcher.gather is not None:
            self._prefetcher.issue_all()
            for group in groups:
                group.gather(self._prefetcher.gather)

    def record(self, layer: StreamedLayer) -> tuple[Tape, int, OpenForward]:
        """Notes a forward call that has a graph. Returns its tape and position, and a mark that only the graph is to hold."""
        tape, position = (self._order_of_all if self.is_together else self.order).record(layer.index)
        open_forward = tape.open_forward()
        self.open.add(open_forward)
        return tape, position, open_forward

    def wait_for_head(self, layer: StreamedLayer) -> None:
        """Waits for residents before the last layer: some code reads the head's weight without its call (Liger, TRL)."""
        if layer is self._last_layer:
            if self.is_together:
                self._gather(self._groups)
            for group in self._groups:
                group.wait_for_step()

    def after_backward(self, tape: Tape, position: int) -> Sequence[int]:
        """Notes that the backward of a call has begun. Returns the indices of the layers that are expected after it."""
        self._tape = tape
        if tape.order.together:
            self._prefetcher.let_go()  # of layers that this rank may hold since the forward
        self._in_this_backward.add(tape.open_forward())
        forward_follows = not self._offloader.gradients_complete()
        return tape.order.after_backward(tape, position, self._prefetcher.look_ahead, forward_follows)

    def backward_begins(self, of_forward: OpenForward | None = None, *_: torch.Tensor) -> None:
        """Called when a backward runs, of this forward if it is known. The first call registers what is done at its end."""
        if of_forward is not None:
            self._in_this_backward.add(of_forward)
        task = torch._C._current_graph_task_id()
        if task != self._task:  # if the one before raised, autograd has dropped its callback
            self._watch.end()
            self._task = task
            Variable._execution_engine.queue_callback(_EndOfBackward(self._on_end, task))

    def backward_ends(self, task: int, succeeded: bool) -> None:
        """Called when a backward is over, or an exception ended it. Other forwards may wait for one of their own."""
        if succeeded:
            self.open -= self._in_this_backward
            (self.order if self._tape is None else self._tape.order).end_pass()
            self._tape = None
        self._in_this_backward.clear()
        if succeeded or self._task == task:
            self._task = None

    def is_only_call(self, layer: Streamed) -> bool:
        """Whether no other call of the layer can bring gradients: it runs once in its forward, and no other one is open."""
        return self._tape is not None and self._tape.calls.count(layer.index) == 1 and len(self.open) <= 1

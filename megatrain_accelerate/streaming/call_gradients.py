"""Weight gradients of layers in autograd's graph, from the leaves of a call to the host store.

A layer that is called once in a forward sends its gradients as soon as its backward has been issued. Those of a layer that is
called several times are added up first, and those of a call in pieces of its batch are summed in fp32, as long as one
backward (autograd's graph task) brings them.
"""

from __future__ import annotations

import dataclasses

import torch

from megatrain_accelerate.streaming.call_order import Tape
from megatrain_accelerate.streaming.grad_offload import GradientOffloader
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.micro_batches import GradientSums, LayerSums


@dataclasses.dataclass(frozen=True, eq=False)
class CutCall:
    """A call of a layer in pieces of its batch. Each piece is a :class:`GraphCall`; their weight gradients leave as one.

    Attributes:
        layer, tape: as of a piece.
        count: number of pieces.
    """

    layer: StreamedLayer
    tape: Tape
    count: int


class CallGradients:
    """The gradients of the backwards that are under way. One object per engine.

    Args:
        offloader: takes what is complete.
        sums: for calls in pieces.
    """

    def __init__(self, offloader: GradientOffloader, sums: GradientSums) -> None:
        self._offloader = offloader
        self._fp32_sums = sums
        self._sums: dict[tuple[int, int], tuple[StreamedLayer, dict[int, torch.Tensor]]] = {}
        """Gradients of layers that run several times in one forward, by the backward's number and the layer's index."""
        self._pieces: dict[tuple[int, CutCall], LayerSums] = {}
        """Gradients of calls in pieces, by the backward's number."""

    def send(self, layer: StreamedLayer, found: dict[int, torch.Tensor]) -> None:
        """Sends gradients to ``parameter.grad``.

        Args:
            layer: whose they are.
            found: by place among the layer's trainable parameters.
        """
        if found:
            # One that was frozen since the forward takes no gradient.
            gradients = [
                found.get(row) if state.parameter.requires_grad else None for row, state in enumerate(layer.trainable)
            ]
            self._offloader.offload(layer, gradients)

    def deliver(self, task: int, tape: Tape, layer: StreamedLayer, found: dict[int, torch.Tensor]) -> None:
        """Takes the gradients of one call: they go at once unless others of the layer come in this backward."""
        if tape.calls.count(layer.index) == 1:
            self.send(layer, found)
        elif found:
            self.add_up(task, layer, found)

    def add_piece(self, task: int, cut: CutCall, found: dict[int, torch.Tensor], is_whole: bool) -> None:
        """Adds gradients of a piece to those of the others; when all pieces have brought theirs they go as those of one call.

        Args:
            task: the backward.
            cut: the call.
            found: the gradients.
            is_whole: whether the piece brings no more of them.
        """
        key = (task, cut)
        if key not in self._pieces:
            self._pieces[key] = self._fp32_sums.begin(cut.layer.unit.layout)
        sums = self._pieces[key]
        sums.add([found.get(row) for row in range(len(cut.layer.trainable))])
        sums.complete_pieces += is_whole
        if sums.complete_pieces == cut.count:
            self._deliver_pieces(*key)

    def _deliver_pieces(self, task: int, cut: CutCall) -> None:
        sums = self._pieces.pop((task, cut))
        is_added_up = cut.tape.calls.count(cut.layer.index) > 1
        taken = sums.take(to_stay=cut.layer.unit.is_on_device or is_added_up)
        self.deliver(task, cut.tape, cut.layer, {row: gradient for row, gradient in enumerate(taken) if gradient is not None})

    def add_up(self, task: int, layer: StreamedLayer, found: dict[int, torch.Tensor]) -> None:
        """Adds gradients to those of the layer's other calls in one backward, as autograd does before it accumulates."""
        _, sums = self._sums.setdefault((task, layer.index), (layer, {}))
        for row, gradient in found.items():
            sums[row] = sums[row].add_(gradient) if row in sums else gradient

    def finish(self, task: int) -> None:
        """A backward is over: what has been added up goes."""
        for at in [key for key in self._pieces if key[0] == task]:
            self._deliver_pieces(*at)
        for key in [key for key in self._sums if key[0] == task]:
            self.send(*self._sums.pop(key))

    def drop(self, task: int) -> None:
        """A backward has failed: what it left counts for nothing."""
        for at in [key for key in self._pieces if key[0] == task]:
            del self._pieces[at]
        for key in [key for key in self._sums if key[0] == task]:
            del self._sums[key]

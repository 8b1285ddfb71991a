"""Weight gradients of layers in autograd's graph, from the leaves of a call to the host store.

A layer that is called once in a forward sends its gradients as soon as its backward has been issued. Those of a layer that is
called several times are added up first, and those of a call in pieces of its batch are summed in fp32, as long as one
backward (autograd's graph task) brings them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping

import torch

from megatrain_accelerate.memory.flat_layout import FlatLayout
from megatrain_accelerate.streaming.call_order import Tape
from megatrain_accelerate.streaming.grad_offload import GradientOffloader
from megatrain_accelerate.streaming.layer import StreamedLayer


class LayerSums:
    """fp32 sums of one layer's weight gradients over the pieces of a call, rounded once when they leave.

    They lie in ``buffer``, flat fp32 memory, which nobody else uses while they live.
    """

    def __init__(self, layout: FlatLayout, buffer: torch.Tensor) -> None:
        self._entries = layout.trainable_entries
        self._buffer = buffer
        self._sums: dict[int, torch.Tensor] = {}
        self.complete_pieces = 0
        """Pieces whose gradients are all in the sums."""

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Adds one piece's gradients, by place among the layer's trainable parameters."""
        for row, gradient in gradients.items():
            if row in self._sums:
                self._sums[row].add_(gradient)
            else:
                spec, begin = self._entries[row].spec, self._entries[row].state_offset
                assert begin is not None
                self._sums[row] = self._buffer[begin : begin + spec.numel].view(spec.shape).copy_(gradient)

    def take(self, to_stay: bool) -> dict[int, torch.Tensor]:
        """The sums of what pieces had gradients of: fp32, valid until the next layer's begin.

        Those that are ``to_stay`` are tensors of their own, rounded to the dtypes of the weights.
        """
        if not to_stay:
            return self._sums
        return {row: total.to(self._entries[row].spec.dtype, copy=True) for row, total in self._sums.items()}


class GradientSums:
    """Where the layers' sums lie: one flat buffer on the device, as large as the largest layer's trained parameters.

    Owner: the runtime. Writer and reader: the compute stream. The buffer is made when the first call is cut, and belongs to
    one layer's sums as long as these live. Sums that begin meanwhile (of a backward within a backward) get memory of their
    own.
    """

    def __init__(self, device: torch.device, layouts: Iterable[FlatLayout]) -> None:
        self._device = device
        self._elements = max((layout.state_elements for layout in layouts), default=0)
        self._buffer: torch.Tensor | None = None
        self._user: weakref.ref[LayerSums] | None = None
        """The sums in the buffer."""

    @property
    def planned_bytes(self) -> int:
        return 4 * self._elements

    @property
    def is_made(self) -> bool:
        return self._buffer is not None

    def begin(self, layout: FlatLayout) -> LayerSums:
        if self._buffer is None:
            self._buffer = torch.empty(self._elements, dtype=torch.float32, device=self._device)
        if self._user is not None and self._user() is not None:
            return LayerSums(layout, torch.empty(layout.state_elements, dtype=torch.float32, device=self._device))
        sums = LayerSums(layout, self._buffer)
        self._user = weakref.ref(sums)
        return sums


@dataclasses.dataclass(frozen=True, eq=False)
class CutCall:
    """A call of a layer in pieces of its batch, whose weight gradients leave as one."""

    layer: StreamedLayer
    tape: Tape
    count: int


class CallGradients:
    """Gradients of the backwards that are under way, by their numbers. One object per engine."""

    def __init__(self, offloader: GradientOffloader, sums: GradientSums) -> None:
        self._offloader = offloader
        self._fp32_sums = sums
        self._sums: dict[int, dict[StreamedLayer, dict[int, torch.Tensor]]] = {}
        """Of layers that run several times in one forward."""
        self._pieces: dict[tuple[int, CutCall], LayerSums] = {}
        """Of calls in pieces."""

    def deliver(self, task: int, tape: Tape, layer: StreamedLayer, found: dict[int, torch.Tensor]) -> None:
        """Takes the gradients of one call: they go at once unless others of the layer come in this backward."""
        if tape.calls.count(layer.index) == 1:
            self._offloader.offload(layer, found)
        elif found:
            self.add_up(task, layer, found)

    def add_piece(self, task: int, cut: CutCall, found: dict[int, torch.Tensor], is_whole: bool) -> None:
        """Adds gradients of a piece to those of the others; when all pieces have brought theirs they go as those of one call.

        ``is_whole`` tells that the piece brings no more of them.
        """
        if (task, cut) not in self._pieces:
            self._pieces[task, cut] = self._fp32_sums.begin(cut.layer.unit.layout)
        sums = self._pieces[task, cut]
        sums.add(found)
        sums.complete_pieces += is_whole
        if sums.complete_pieces == cut.count:
            self._deliver_pieces(task, cut)

    def _deliver_pieces(self, task: int, cut: CutCall) -> None:
        sums = self._pieces.pop((task, cut))
        is_added_up = cut.tape.calls.count(cut.layer.index) > 1
        self.deliver(task, cut.tape, cut.layer, sums.take(to_stay=cut.layer.unit.is_on_device or is_added_up))

    def add_up(self, task: int, layer: StreamedLayer, found: dict[int, torch.Tensor]) -> None:
        """Adds gradients to those of the layer's other calls in one backward, as autograd does before it accumulates."""
        sums = self._sums.setdefault(task, {}).setdefault(layer, {})
        for row, gradient in found.items():
            sums[row] = sums[row].add_(gradient) if row in sums else gradient

    def finish(self, task: int) -> None:
        """A backward is over: what has been added up goes."""
        for key in [key for key in self._pieces if key[0] == task]:
            self._deliver_pieces(*key)
        for layer, found in self._sums.pop(task, {}).items():
            self._offloader.offload(layer, found)

    def drop(self, task: int) -> None:
        """A backward has failed: what it left counts for nothing."""
        for key in [key for key in self._pieces if key[0] == task]:
            del self._pieces[key]
        self._sums.pop(task, None)

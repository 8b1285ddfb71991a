"""Takes the weight gradients of layers in autograd's graph from the leaves of a call to the offloader. Gradients of a layer
that is called once in a forward are offloaded as soon as its backward has been issued. Within one backward (a graph task of
autograd) those of several calls are added up first, and those of the pieces of one call are summed in fp32."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.store.layout import FlatLayout
from megatrain_accelerate.transfer.call_order import Tape
from megatrain_accelerate.transfer.parts import Streamed


class LayerSums:
    """fp32 sums of one layer's weight gradients over the pieces of a call, rounded once when they are offloaded. They are
    views of ``buffer``, flat fp32 memory that nothing else uses while they live."""

    def __init__(self, layout: FlatLayout, buffer: torch.Tensor) -> None:
        self._entries = layout.trainable_entries
        self._buffer = buffer
        self._sums: dict[int, torch.Tensor] = {}
        self.complete_pieces = 0

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Adds one piece's gradients, by index among the layer's trainable parameters."""
        for row, gradient in gradients.items():
            if row in self._sums:
                self._sums[row].add_(gradient)
            else:
                spec, begin = self._entries[row].spec, self._entries[row].state_offset
                assert begin is not None
                self._sums[row] = self._buffer[begin : begin + spec.numel].view(spec.shape).copy_(gradient)

    def take(self, to_stay: bool) -> dict[int, torch.Tensor]:
        """Returns the fp32 sums of the parameters that got a gradient, by index. They are valid until the sums of the next
        layer begin. With ``to_stay`` they are copies, rounded to the dtypes of the weights."""
        if not to_stay:
            return self._sums
        return {row: total.to(self._entries[row].spec.dtype, copy=True) for row, total in self._sums.items()}


class GradientSums:
    """The memory of all :class:`LayerSums`: one flat buffer on the device, as large as the largest layer's trained parameters.
    Owner: the runtime. Writer and reader: the compute stream. The buffer is allocated when the first call is cut, and serves
    one layer's sums at a time. Sums that begin meanwhile (in a backward within a backward) get memory of their own."""

    def __init__(self, device: torch.device, layouts: Iterable[FlatLayout]) -> None:
        self._device = device
        self.planned_bytes = 4 * max((layout.state_elements for layout in layouts), default=0)
        self.buffer: torch.Tensor | None = None
        self.user: weakref.ref[LayerSums] | None = None

    def begin(self, layout: FlatLayout) -> LayerSums:
        if self.buffer is None:
            self.buffer = torch.empty(self.planned_bytes // 4, dtype=torch.float32, device=self._device)
        if self.user is not None and self.user() is not None:
            return LayerSums(layout, torch.empty_like(self.buffer))
        self.user = weakref.ref(sums := LayerSums(layout, self.buffer))
        return sums

    def close(self) -> None:
        self.buffer = None


class Backward:
    """One backward that is under way (a graph task of autograd), with its gradients that wait for others to be added."""

    def __init__(self, offloader: GradientOffloader, piece_sums: GradientSums) -> None:
        self.calls: list[Any] = []
        """The calls of layers, or pieces of calls, that this backward has reached (:class:`.GraphCall`)."""
        self._offloader = offloader
        self._piece_sums = piece_sums
        self._sums: dict[Streamed, dict[int, torch.Tensor]] = {}
        """Gradients of layers that run several times in one forward, or whose calls may bring more."""
        self._pieces: dict[tuple[Tape, int], tuple[Streamed, LayerSums]] = {}
        """The sums of calls in pieces, by tape and position of the call."""

    def take(self, call: Any, found: dict[int, torch.Tensor], is_complete: bool) -> None:
        """Takes gradients of a call. They are offloaded at once, unless the layer can get others in this backward. Those of a
        piece are added to the other pieces' and offloaded with the last. ``is_complete``: the call or piece brings no more."""
        if call.pieces == 1:
            self._deliver(call.tape, call.layer, found, is_complete)
            return
        place = (call.tape, call.position)
        if place not in self._pieces:
            self._pieces[place] = (call.layer, self._piece_sums.begin(call.layer.unit.layout))
        sums = self._pieces[place][1]
        sums.add(found)
        sums.complete_pieces += is_complete
        if sums.complete_pieces == call.pieces:
            self._deliver_pieces(place)

    def _deliver_pieces(self, place: tuple[Tape, int]) -> None:
        tape, (layer, sums) = place[0], self._pieces.pop(place)
        is_added_up = tape.calls.count(layer.index) > 1
        self._deliver(tape, layer, sums.take(to_stay=layer.unit.is_on_device or is_added_up), is_complete=True)

    def _deliver(self, tape: Tape, layer: Streamed, found: dict[int, torch.Tensor], is_complete: bool) -> None:
        if is_complete and tape.calls.count(layer.index) == 1:
            self._offloader.offload(layer, found)
            return
        # They are added to those of the layer's other calls, as autograd does before it accumulates.
        sums = self._sums.setdefault(layer, {})
        for row, gradient in found.items():
            sums[row] = sums[row].add_(gradient) if row in sums else gradient

    def finish(self) -> None:
        """Offloads what has been added up. Called when the backward is over."""
        for place in list(self._pieces):
            self._deliver_pieces(place)
        for layer, found in self._sums.items():
            self._offloader.offload(layer, found)

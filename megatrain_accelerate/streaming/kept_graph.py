"""The inner graph of a layer that isn't recomputed: activations are kept, on the device or on the host, weights aren't.

What autograd saves of the slot's weights is replaced by their place in the slot (``saved_tensors_hooks``), and put back
from whatever slot holds the layer when its backward comes. So a kept layer costs its activations only; an offloaded one
costs them in host memory (``activation_offload.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.streaming.activation_offload import ParcelPlace, Recording
from megatrain_accelerate.streaming.device_slots import WeightSlot


def edges_of(outputs: Sequence[torch.Tensor]) -> list[GradientEdge | None]:
    """Where backward enters the graph of each output; None for one without a gradient.

    Whoever holds these instead of the outputs holds none of their memory: the layer above has given it up when the backward of
    this one comes. Call it where gradients are enabled.
    """
    # Of a view, whose node is torch's own and holds the graph: one written in Python doesn't keep itself alive in torch 2.5.
    return [get_gradient_edge(output.view_as(output)) if output.requires_grad else None for output in outputs]


def entered_from_elsewhere() -> UnsupportedError:
    """For who finds that backward is in a layer's inner graph while the layer's node isn't."""
    return UnsupportedError(
        "backward went into a streamed layer's forward from elsewhere than its outputs: through torch.autograd.grad() within "
        "it, or a loss that it leaves in an attribute. A layer that streams has no graph there; let it return the loss with "
        "its output, or name other layers in megatrain_config.layer_classes"
    )


@dataclasses.dataclass(frozen=True)
class _SlotPlace:
    """A view of the slot's buffer, without the slot."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _SlotPlace:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def view(self, slot: WeightSlot) -> torch.Tensor:
        return slot.buffer.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class _SavedTensors:
    """What stands in the graph for each tensor that autograd saves.

    An object of its own: the graph holds it through its hooks, so that one that holds the graph would never be freed.
    """

    def __init__(self, slot: WeightSlot, offloaded: Recording | None) -> None:
        self.slot: WeightSlot | None = slot
        self._address = slot.buffer.untyped_storage().data_ptr()
        self._offloaded = offloaded

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() == self._address:
            return _SlotPlace.of(tensor)
        if tensor.grad_fn is not None:
            # Its own node may be the one that saves it (softmax), and would hold itself through it if backward never comes.
            tensor = tensor.detach()
        place = self._offloaded.place(tensor) if self._offloaded is not None else None
        return tensor if place is None else place

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _SlotPlace):
            if self.slot is None:
                raise entered_from_elsewhere()
            return packed.view(self.slot)
        return packed.tensor() if isinstance(packed, ParcelPlace) else packed


class KeptGraph:
    """One kept run of a layer: leaves and ends of its inner graph.

    Owner: the layer's autograd node. Its memory is given back by the node's first backward; a second one recomputes.

    Args:
        slot: where the layer's weights are while it runs forward.
        offloaded: collects what goes to the host; None for a layer whose activations stay on the device.
    """

    def __init__(self, slot: WeightSlot, offloaded: Recording | None = None) -> None:
        self._saved = _SavedTensors(slot, offloaded)
        self.inputs: list[torch.Tensor] = []
        """The layer's input tensors, cut off from the outer graph."""
        self.weight_leaves: list[torch.Tensor] = []
        """The trained weights, as leaves of the inner graph: for their place in it, not for their values."""
        self.edges: list[GradientEdge | None] = []
        """See :func:`edges_of`."""

    def recording(self) -> saved_tensors_hooks:
        """Autograd saves what the body computes, less the weights."""
        return saved_tensors_hooks(self._saved.pack, self._saved.unpack)

    def leave_slot(self) -> None:
        """Forward is over: the slot may hold another layer from now on."""
        self._saved.slot = None

    def use_slot(self, slot: WeightSlot) -> None:
        """Backward begins: the layer's weights are in ``slot``."""
        self._saved.slot = slot

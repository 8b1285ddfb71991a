"""The hooks by which autograd saves a layer's tensors. A weight is saved as its position in the slot, and read in backward
from whichever slot holds the layer then. ``saved_tensors_hooks`` switch off autograd's check that nobody wrote to a saved
tensor, and hide hooks that are active around the layer (activation checkpointing, ``save_on_cpu``). The hooks here do both:
they check for writes, and call those around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatrain_accelerate.transfer.activation_offload import OffloadedTensor, Recording
from megatrain_accelerate.transfer.streams import Place, WeightSlot


class SlotPlace(NamedTuple):
    """A view of a weight, saved without its slot. ``reader`` is a call of the layer. Within a backward its method ``slot()``
    returns the slot that holds the layer's weights at the time."""

    reader: Any
    place: Place

    def tensor(self) -> torch.Tensor:
        view: torch.Tensor = self.reader.slot().view(self.place)
        # With ``create_graph`` backward makes a graph, which mustn't hold a slot.
        return view.clone() if torch.is_grad_enabled() else view


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def innermost_hooks() -> Hooks | None:
    """The innermost active hooks, which are those that autograd calls, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):  # before torch 2.6
    _entered = threading.local()
    _enter, _exit = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    def _enter_and_note(self: saved_tensors_hooks) -> None:
        _enter(self)
        _entered.__dict__.setdefault("hooks", []).append((self.pack_hook, self.unpack_hook))

    def _forget_and_exit(self: saved_tensors_hooks, *error: object) -> None:
        _entered.hooks.pop()
        _exit(self, *error)

    def innermost_hooks() -> Hooks | None:
        hooks = _entered.__dict__.get("hooks")
        return hooks[-1] if hooks else None

    saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = _enter_and_note, _forget_and_exit  # type: ignore


class SavedTensors:
    """The hooks for one run of a layer. Tensors in one of the ``slots`` (by address) are saved as positions for the slot's
    reader. ``offloaded`` records those that go to the host. It is None if all stay on the device."""

    def __init__(self, slots: Mapping[int, WeightSlot], offloaded: Recording | None = None) -> None:
        self._slot_at = slots.get
        self._place = None if offloaded is None else offloaded.place
        self._outer = innermost_hooks()

    def recording(self) -> saved_tensors_hooks:
        """Saves what the body computes. Autograd calls the innermost hooks only, so these call those around the layer."""
        if self._outer is None:
            return saved_tensors_hooks(self.pack, _unpack)
        outer_unpack = self._outer[1]
        return saved_tensors_hooks(self.pack, lambda at: at.tensor() if type(at) is SlotPlace else outer_unpack(at))

    def pack(self, tensor: torch.Tensor) -> Any:  # called several dozen times a layer
        """What autograd saves instead of the tensor."""
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # sparse tensors and wrappers have no memory of their own
            address = -1
        if (slot := self._slot_at(address)) is not None:
            place = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
            place = slot.interned_places.setdefault(place, place)
            # Faster than SlotPlace(...), which is a Python function.
            return tuple.__new__(SlotPlace, (slot.current_call or slot.require_current_call(), place))
        if self._outer is not None:
            return self._outer[0](tensor)
        if not tensor.is_leaf:
            # If the node that made it also saves it (softmax), this would be a cycle that no garbage collector sees.
            tensor = tensor.detach()
        if self._place is not None and (away := self._place(tensor)) is not None:
            return away
        # Most tensors were never written to. Without a tuple there is less for the garbage collector to visit.
        return (tensor, version) if (version := tensor._version) else tensor


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, (SlotPlace, OffloadedTensor)):
        return packed.tensor()
    tensor, version = packed if type(packed) is tuple else (packed, 0)
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
        )
    return tensor

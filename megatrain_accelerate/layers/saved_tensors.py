"""What autograd saves of a layer that stays in its graph: weights as places in a slot, read again from whatever slot holds the
layer when its backward comes, the rest checked as autograd would. ``saved_tensors_hooks`` switch off autograd's own check that
nobody wrote to a saved tensor, and hide the hooks of who is around the layer (activation checkpointing, ``save_on_cpu``): both
are made good here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatrain_accelerate.transfer.activation_offload import OffloadedTensor, Recording
from megatrain_accelerate.transfer.streams import Place, WeightSlot


class SlotPlace(NamedTuple):
    """A view of a layer's slot, without the slot: the ``slot()`` of its reader, a call of the layer, is the one that holds the
    layer's weights now; within a backward only."""

    reader: Any
    place: Place

    def tensor(self) -> torch.Tensor:
        view: torch.Tensor = self.reader.slot().view(self.place)
        # The graph of a gradient that is itself differentiated must not hold a slot.
        return view.clone() if torch.is_grad_enabled() else view


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def innermost_hooks() -> Hooks | None:
    """The hooks that act now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):  # before torch 2.6, which doesn't tell
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
    """The hooks under which one run of a layer saves what its backward needs. What lies in one of the ``slots``, by address,
    is its reader's; ``offloaded`` collects what goes to the host, None where it stays on the device."""

    def __init__(self, slots: Mapping[int, WeightSlot], offloaded: Recording | None = None) -> None:
        self._slot_at = slots.get
        self._place = None if offloaded is None else offloaded.place
        self._outer = innermost_hooks()

    def recording(self) -> saved_tensors_hooks:
        """Autograd saves what the body computes: only the innermost hooks act."""
        if self._outer is None:
            return saved_tensors_hooks(self.pack, _unpack)
        outer_unpack = self._outer[1]
        return saved_tensors_hooks(self.pack, lambda at: at.tensor() if type(at) is SlotPlace else outer_unpack(at))

    def pack(self, tensor: torch.Tensor) -> Any:  # called several dozen times a layer
        """What is saved in the tensor's place."""
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # sparse ones and wrappers around others have no memory of their own
            address = -1
        if (slot := self._slot_at(address)) is not None:
            place = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
            place = slot.places.setdefault(place, place)
            # Past the function of Python that makes a named tuple.
            return tuple.__new__(SlotPlace, (slot.reader or slot.require_reader(), place))
        if self._outer is not None:
            return self._outer[0](tensor)
        if not tensor.is_leaf:
            # Its own node may be the one that saves it (softmax): a cycle that no garbage collector sees.
            tensor = tensor.detach()
        if self._place is not None and (away := self._place(tensor)) is not None:
            return away
        # Most were never written to, and the garbage collector has a tuple less to look at.
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

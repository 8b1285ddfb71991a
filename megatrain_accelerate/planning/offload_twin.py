"""Offloaded activations on tensors without data: what a prediction counts as device memory, and when.

The twin of :class:`~megatrain_accelerate.streaming.activation_offload.ActivationOffloader`: it lets go of the same storages at
the same points of a step and makes them anew where they come back, but copies nothing.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from megatrain_accelerate.streaming import activation_offload


class _Parcel:
    """One storage: ``base`` holds it, as flat bytes or as the tensor that was saved; None while it is away."""

    def __init__(self, source: torch.Tensor) -> None:
        self.base: torch.Tensor | None = source
        self.size_bytes = source.untyped_storage().nbytes()
        self.device = source.device

    def come_back(self) -> None:
        if self.base is None:
            self.base = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)


class OffloadTwin:
    """The runs of one step, in the order in which they are issued."""

    def __init__(self) -> None:
        self._leaving: collections.deque[tuple[int, list[_Parcel]]] = collections.deque()
        self._runs: list[list[weakref.ref[_Parcel]]] = []

    def run(self, forward: Callable[[], Any], stay: Iterable[torch.Tensor] | None) -> Any:
        """Runs a layer once, or a piece of its batch.

        Args:
            forward: does it.
            stay: what stays of all that autograd saves while it runs; None if everything does.
        """
        place = len(self._runs)
        self._runs.append([])
        self._give_up(lambda run: run < place - activation_offload.LEAVING_RUNS)
        parcels: dict[int, _Parcel] = {}
        with contextlib.nullcontext() if stay is None else self._leaving_hooks(parcels, stay):
            output = forward()
        self._runs[place] = [weakref.ref(parcel) for parcel in parcels.values()]
        if parcels:
            self._leaving.append((place, list(parcels.values())))
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: self._backward_of(place))
        return output

    def _leaving_hooks(self, parcels: dict[int, _Parcel], stay: Iterable[torch.Tensor]) -> saved_tensors_hooks:
        staying = {tensor.untyped_storage()._cdata for tensor in stay}

        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage.nbytes() < activation_offload.MIN_OFFLOADED_BYTES or storage._cdata in staying:
                return tensor
            parcel = parcels.setdefault(storage._cdata, _Parcel(tensor.detach()))
            return parcel, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            parcel, dtype, shape, stride, offset = packed
            parcel.come_back()
            base = parcel.base
            if base.dtype != dtype:
                size = dtype.itemsize
                base = base.as_strided((base.untyped_storage().nbytes() // base.dtype.itemsize,), (1,), 0)
                base = base.view(torch.uint8)[: parcel.size_bytes // size * size].view(dtype)
            return torch.as_strided(base, shape, stride, offset)

        return saved_tensors_hooks(pack, unpack)

    def _backward_of(self, place: int) -> None:
        self._give_up(lambda run: run not in (place, place - 1))
        for run in (place, place - 1):
            for parcel in [ref() for ref in self._runs[run]] if run >= 0 else ():
                if parcel is not None:
                    parcel.come_back()

    def _give_up(self, is_over: Callable[[int], bool]) -> None:
        for departure in [departure for departure in self._leaving if is_over(departure[0])]:
            self._leaving.remove(departure)
            for parcel in departure[1]:
                parcel.base = None

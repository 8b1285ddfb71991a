"""One parameter in the store: its views of the unit's flat buffers, and the only writer of its ``data`` and ``grad``."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from megatrain_accelerate.kernels.moments import Moments
from megatrain_accelerate.store.layout import FlatEntry, Share


class NotedTensor:
    """Remembers a tensor and its version, without keeping the tensor alive."""

    __slots__ = ("_id", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._id, self._tensor, self._version = id(tensor), weakref.ref(tensor), tensor._version

    def is_still(self, tensor: torch.Tensor | None) -> bool:
        """Whether ``tensor`` is the remembered one, and nobody has written to it since."""
        # ``id`` alone isn't unique. It comes first: the weak reference of a tensor that only C++ holds must not be called.
        return id(tensor) == self._id and self._tensor() is tensor and self._version == tensor._version  # type: ignore[union-attr]


_handles: Any = WeakIdKeyDictionary()
"""All handles of each parameter. A frozen one may be in the stores of several models."""


class ParamHandle:
    """A store's access to one parameter. Only here are ``data`` and ``grad`` of a parameter in a store assigned."""

    # Each forward checks all handles, and the processor's cache holds more small objects.
    __slots__ = ("__weakref__", "_address", "_all", "_seen_version", "_shown", "_sum", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._shown: torch.Tensor | None = None
        self._address: int | None = None
        self._seen_version: int | None = None
        """``_version`` of the parameter when the master last agreed with its data. None if they count as written."""
        self._sum: NotedTensor | None = None
        self._all: weakref.WeakSet[ParamHandle] = _handles.setdefault(parameter, weakref.WeakSet())
        self._all.add(self)

    def show(self, data: torch.Tensor) -> None:
        """Makes ``data``, which agree with the master, the parameter's data."""
        if not self._is_shown_by_any:
            for handle in self._all:
                handle.mark_written()  # other stores must take over the foreign data, too
        self.parameter.data = self._shown = data
        self._address = data.data_ptr()
        self.note_version()

    @property
    def is_shown(self) -> bool:
        """Whether the parameter's data are those that :meth:`show` set."""
        return self.parameter.data_ptr() == self._address

    @property
    def _is_shown_by_any(self) -> bool:
        return self.is_shown or any(handle.is_shown for handle in self._all)

    @property
    def is_written(self) -> bool:
        """Whether somebody wrote to the parameter or replaced its data since they last agreed with the master."""
        return self.parameter._version != self._seen_version or not self._is_shown_by_any

    def note_version(self) -> None:
        """Notes that the master agrees with the parameter's data."""
        self._seen_version = self.parameter._version

    def mark_written(self) -> None:
        """Makes the data count as written, even if no version tells of a write."""
        self._seen_version = None

    def fill(self, weight: torch.Tensor) -> None:
        """Issues a copy of ``weight``, of the same shape and dtype, into the data. It doesn't count as a write."""
        self.parameter.data.copy_(weight, non_blocking=True)

    def give_back(self, data: torch.Tensor) -> None:
        """Makes ``data`` the parameter's data, or those of another store that holds the parameter."""
        self._shown = self._address = None
        self.parameter.data = next((other._shown for other in self._all if other._shown is not None), data)

    @contextlib.contextmanager
    def replaced(self, data: torch.Tensor, gradient: torch.Tensor | None) -> Iterator[None]:
        """Gives the parameter this data and gradient, of any dtype and device, for the body. Writes in the body don't
        count."""
        before = self.parameter.data, self.parameter.grad
        self._replace(data, gradient)
        try:
            yield
        finally:
            self._replace(*before)
            self.note_version()

    def _replace(self, data: torch.Tensor, gradient: torch.Tensor | None) -> None:
        self.parameter.grad = None  # a gradient must match the data's dtype and device
        self.parameter.data = data
        self.parameter.grad = gradient

    def set_gradient(self, gradient: torch.Tensor | None, keeps_sum: bool = False) -> None:
        """Sets ``parameter.grad``. A gradient that was noted as an fp32 sum is forgotten, unless it ``keeps_sum``."""
        self.parameter.grad = gradient
        if not keeps_sum:
            self._sum = None

    def note_fp32_sum(self) -> None:
        """Notes that ``parameter.grad`` is the bf16 half of an fp32 sum, whose low half the store has."""
        assert self.parameter.grad is not None
        self._sum = NotedTensor(self.parameter.grad)

    @property
    def has_fp32_sum(self) -> bool:
        """Whether the low half counts: nobody has written to the noted gradient, replaced or dropped it."""
        return self._sum is not None and self._sum.is_still(self.parameter.grad)


def written_among(handles: Sequence[ParamHandle]) -> list[int]:
    """Indices of the handles that are :attr:`~ParamHandle.is_written`. Faster than asking each, as every forward does."""
    return [
        place
        for place, at in enumerate(handles)
        if (at.parameter._version != at._seen_version or at.parameter.data_ptr() != at._address) and at.is_written
    ]


@dataclasses.dataclass
class ParameterState:
    """One parameter in the store, as views of its unit's flat buffers, each with a storage of its own: ``weight`` (bf16 or
    fp32), ``gradient`` (of the same dtype, None for a unit on the device, whose gradients are autograd's own), ``residual``
    (int16) and the optimizer's ``moments``. A frozen parameter has the weight alone."""

    handle: ParamHandle
    parameter: nn.Parameter = dataclasses.field(init=False)
    entry: FlatEntry
    weight: torch.Tensor
    residual: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    moments: Moments | None = None
    gradient_residual: torch.Tensor | None = None
    """int16 low half of an fp32 sum of gradients, at the unit's home, for the step. None before it is allocated."""
    sum_residual: torch.Tensor | None = None
    """The low half beside ``parameter.grad``, where the sum is made. For a resident parameter whose states are on the host it
    isn't :attr:`gradient_residual`. It counts while the handle :attr:`~ParamHandle.has_fp32_sum`."""
    share: Share | None = None
    """The share of the unit that this rank steps, if several share it."""
    row: int | None = None
    """Index in tables of all trained parameters of a model. None for a frozen one."""
    normed: NotedTensor | None = None
    """The gradient whose norm is in the table of norms, or will be once its copy is over."""
    is_rewritten: bool = False
    """Whether a script wrote to that gradient or replaced it after the last backward."""

    def __post_init__(self) -> None:
        self.parameter = self.handle.parameter

    @property
    def name(self) -> str:
        return self.entry.spec.name

    def note_norm(self, gradient: torch.Tensor, rewritten: bool = False) -> None:
        """Notes that the table of norms has the norm of ``gradient``, or will have it once its copy is over."""
        self.normed, self.is_rewritten = NotedTensor(gradient), rewritten

    @property
    def has_norm(self) -> bool:
        """Whether the table has the norm of ``parameter.grad``: nobody has written to it since, replaced or dropped it."""
        return self.normed is not None and self.normed.is_still(self.parameter.grad)

    @property
    def has_foreign_gradient(self) -> bool:
        """Whether ``parameter.grad`` isn't in the memory that the step reads: autograd or a script made it."""
        gradient = self.parameter.grad
        return gradient is not None and self.gradient is not None and gradient.data_ptr() != self.gradient.data_ptr()

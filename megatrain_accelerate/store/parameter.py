"""One parameter in the store: its views of the unit's flat buffers, and the one writer of its ``data`` and ``grad``."""

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
    """A tensor as it was when it was noted. It isn't kept alive."""

    __slots__ = ("_id", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._id, self._tensor, self._version = id(tensor), weakref.ref(tensor), tensor._version

    def is_still(self, tensor: torch.Tensor | None) -> bool:
        """Whether ``tensor`` is the noted one, and nobody wrote to it since."""
        # Another one may come to have its number; one that only C++ holds must not be asked for by a plain reference.
        return id(tensor) == self._id and self._tensor() is tensor and self._version == tensor._version  # type: ignore[union-attr]


_handles: Any = WeakIdKeyDictionary()
"""All of a parameter, by parameter: a frozen one may lie in the stores of several models."""


class ParamHandle:
    """What one store handles a parameter by: ``data`` and ``grad`` of parameters in a store are assigned to only here."""

    # Each forward asks all of them, and finds little of a larger object in the processor's cache.
    __slots__ = ("__weakref__", "_address", "_all", "_seen_version", "_shown", "_sum", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._shown: torch.Tensor | None = None
        self._address: int | None = None
        """Where the data begin that are shown."""
        self._seen_version: int | None = None
        """``_version`` of the parameter when the master last agreed with its data; None where they count as written."""
        self._sum: NotedTensor | None = None
        self._all: weakref.WeakSet[ParamHandle] = _handles.setdefault(parameter, weakref.WeakSet())
        self._all.add(self)

    def show(self, data: torch.Tensor) -> None:
        """Makes ``data``, which agree with the master, the parameter's."""
        if not self._is_shown_by_any:
            for handle in self._all:
                handle.mark_written()  # others take over what somebody put there, too
        self.parameter.data = self._shown = data
        self._address = data.data_ptr()
        self.note_version()

    @property
    def is_shown(self) -> bool:
        """Whether the parameter's data are what :meth:`show` made them."""
        return self.parameter.data_ptr() == self._address

    @property
    def _is_shown_by_any(self) -> bool:
        return self.is_shown or any(handle.is_shown for handle in self._all)

    @property
    def is_written(self) -> bool:
        """Whether somebody wrote to the parameter or replaced its data since the master last agreed with them."""
        return self.parameter._version != self._seen_version or not self._is_shown_by_any

    def note_version(self) -> None:
        """The master agrees with the data as they are now."""
        self._seen_version = self.parameter._version

    def mark_written(self) -> None:
        """The data count as written, though no version may show it."""
        self._seen_version = None

    def fill(self, weight: torch.Tensor) -> None:
        """Issues a copy of ``weight``, of the same shape and dtype, into the data; it doesn't count as a write."""
        self.parameter.data.copy_(weight, non_blocking=True)

    def give_back(self, data: torch.Tensor) -> None:
        """Makes ``data`` the parameter's, or the copy of another store that holds it."""
        self._shown = self._address = None
        self.parameter.data = next((other._shown for other in self._all if other._shown is not None), data)

    @contextlib.contextmanager
    def replaced(self, data: torch.Tensor, gradient: torch.Tensor | None) -> Iterator[None]:
        """The parameter has these, of any dtype and device, while the body runs. No write up to its end counts."""
        before = self.parameter.data, self.parameter.grad
        self._replace(data, gradient)
        try:
            yield
        finally:
            self._replace(*before)
            self.note_version()

    def _replace(self, data: torch.Tensor, gradient: torch.Tensor | None) -> None:
        self.parameter.grad = None  # data must be of its dtype and device
        self.parameter.data = data
        self.parameter.grad = gradient

    def set_gradient(self, gradient: torch.Tensor | None, keeps_sum: bool = False) -> None:
        """Makes ``gradient`` the parameter's; the one that was noted as an fp32 sum is none any more, unless ``keeps_sum``."""
        self.parameter.grad = gradient
        if not keeps_sum:
            self._sum = None

    def note_fp32_sum(self) -> None:
        """``parameter.grad``, as it is now, is the bf16 half of a sum whose low half the store has."""
        assert self.parameter.grad is not None
        self._sum = NotedTensor(self.parameter.grad)

    @property
    def has_fp32_sum(self) -> bool:
        """Whether the low half counts: not so if somebody wrote to the gradient, replaced or dropped it."""
        return self._sum is not None and self._sum.is_still(self.parameter.grad)


def written_among(handles: Sequence[ParamHandle]) -> list[int]:
    """The places of those that are :attr:`~ParamHandle.is_written`; quicker than asking each, as every forward does."""
    return [
        place
        for place, at in enumerate(handles)
        if (at.parameter._version != at._seen_version or at.parameter.data_ptr() != at._address) and at.is_written
    ]


@dataclasses.dataclass
class ParameterState:
    """One parameter in the store: views of its unit's flat buffers, each with a storage of its own: ``weight`` (bf16 or fp32),
    ``gradient`` (the same; None for a unit on the device, whose gradients are autograd's own), ``residual`` (int16) and
    ``moments`` of the optimizer; of a frozen one the weight alone."""

    handle: ParamHandle
    parameter: nn.Parameter = dataclasses.field(init=False)
    entry: FlatEntry
    weight: torch.Tensor
    residual: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    moments: Moments | None = None
    gradient_residual: torch.Tensor | None = None
    """int16, at the unit's home: the low half of an fp32 sum of gradients, for the step. None before it is made."""
    sum_residual: torch.Tensor | None = None
    """The same beside ``parameter.grad``, where the sum is made: another one for a resident parameter whose states are on the
    host. It counts while the handle :attr:`~ParamHandle.has_fp32_sum`."""
    share: Share | None = None
    """What of the unit this rank steps, where several share it."""
    row: int | None = None
    """Its place in tables of all trained parameters of a model; None of a frozen one."""
    normed: NotedTensor | None = None
    """The gradient whose norm the table of norms has, or will have once its copy is over."""
    is_rewritten: bool = False
    """Whether that gradient isn't what the last backward left: a script wrote to it or replaced it."""

    def __post_init__(self) -> None:
        self.parameter = self.handle.parameter

    @property
    def name(self) -> str:
        return self.entry.spec.name

    def note_norm(self, gradient: torch.Tensor, rewritten: bool = False) -> None:
        """The table of norms has, or will have once its copy is over, the norm of ``gradient`` as it is now."""
        self.normed, self.is_rewritten = NotedTensor(gradient), rewritten

    @property
    def has_norm(self) -> bool:
        """Whether the table has the norm of ``parameter.grad``; not so if somebody wrote to it, replaced or dropped it."""
        return self.normed is not None and self.normed.is_still(self.parameter.grad)

    @property
    def has_foreign_gradient(self) -> bool:
        """Whether ``parameter.grad`` lies somewhere else than where the step reads: autograd or a script made it."""
        gradient = self.parameter.grad
        return gradient is not None and self.gradient is not None and gradient.data_ptr() != self.gradient.data_ptr()

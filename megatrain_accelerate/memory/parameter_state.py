"""One parameter in the store: its views of the flat buffers, and what is known of its gradient."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from megatrain_accelerate.memory.flat_layout import FlatEntry
from megatrain_accelerate.optim.int8_moments import Int8Moments


@dataclasses.dataclass
class ParameterState:
    """One parameter in the store, as views of its unit's flat buffers. ``None`` where a frozen one has nothing.

    ``weight`` (its shape, bf16 or fp32), ``gradient`` (the same; None too for a unit on the device, whose gradients are
    autograd's own), ``residual`` (int16), ``exp_avg`` and ``exp_avg_sq`` (of the dtype in which the
    unit keeps moments, None for 8-bit ones), each with a storage of its own.
    """

    parameter: nn.Parameter
    entry: FlatEntry
    weight: torch.Tensor
    residual: torch.Tensor | None
    gradient: torch.Tensor | None = None
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None
    int8_moments: Int8Moments | None = None
    """In the place of ``exp_avg`` and ``exp_avg_sq`` where the unit keeps moments in 8 bits."""
    seen_version: int = -1
    """``_version`` of the parameter when the master last agreed with its weight."""
    gradient_residual: torch.Tensor | None = None
    """int16, at the unit's home: the low half of an fp32 sum of gradients whose bf16 half is the gradient. None before
    :meth:`HostUnit.allocate_gradient_residuals`. What a step reads."""
    sum_residual: torch.Tensor | None = None
    """The same beside ``parameter.grad``, where the sum is made: ``gradient_residual`` itself, but for a resident parameter
    whose states are on the host."""
    _summed: tuple[TensorWeakRef, int] | None = None

    @property
    def name(self) -> str:
        """Name within the unit."""
        return self.entry.spec.name

    @property
    def has_foreign_gradient(self) -> bool:
        """Whether ``parameter.grad`` lies somewhere else than where the step reads: autograd or a script made it."""
        gradient = self.parameter.grad
        return gradient is not None and self.gradient is not None and gradient.data_ptr() != self.gradient.data_ptr()

    def note_fp32_sum(self) -> None:
        """``parameter.grad``, as it is now, is the bf16 half of a sum whose low half is ``sum_residual``."""
        gradient = self.parameter.grad
        assert gradient is not None
        self._summed = (TensorWeakRef(gradient), gradient._version)

    def forget_fp32_sum(self) -> None:
        """``sum_residual`` doesn't count any more."""
        self._summed = None

    @property
    def has_fp32_sum(self) -> bool:
        """Whether ``sum_residual`` counts: not so if somebody wrote to the gradient, replaced or dropped it."""
        gradient = self.parameter.grad
        if gradient is None or self._summed is None:
            return False
        # By identity: another tensor may come to lie at the same address.
        return self._summed[0]() is gradient and self._summed[1] == gradient._version

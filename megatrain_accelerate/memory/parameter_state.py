"""One parameter in the store: its views of the unit's flat buffers."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from megatrain_accelerate.memory.flat_layout import FlatEntry
from megatrain_accelerate.memory.param_handle import ParamHandle
from megatrain_accelerate.optim.moments import Moments


@dataclasses.dataclass
class ParameterState:
    """One parameter in the store, as views of its unit's flat buffers. ``None`` where a frozen one has nothing.

    ``weight`` (its shape, bf16 or fp32), ``gradient`` (the same; None too for a unit on the device, whose gradients are
    autograd's own), ``residual`` (int16) and ``moments`` of the optimizer, each tensor with a storage of its own.
    """

    handle: ParamHandle
    parameter: nn.Parameter = dataclasses.field(init=False)
    """The model's own."""
    entry: FlatEntry
    weight: torch.Tensor
    residual: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    moments: Moments | None = None
    gradient_residual: torch.Tensor | None = None
    """int16, at the unit's home: the low half of an fp32 sum of gradients whose bf16 half is the gradient. None before
    :meth:`HostUnit.allocate_gradient_residuals`. What a step reads."""
    sum_residual: torch.Tensor | None = None
    """The same beside ``parameter.grad``, where the sum is made: ``gradient_residual`` itself, but for a resident parameter
    whose states are on the host. It counts while the handle :attr:`~ParamHandle.has_fp32_sum`."""

    def __post_init__(self) -> None:
        self.parameter = self.handle.parameter

    @property
    def name(self) -> str:
        """Name within the unit."""
        return self.entry.spec.name

    @property
    def has_foreign_gradient(self) -> bool:
        """Whether ``parameter.grad`` lies somewhere else than where the step reads: autograd or a script made it."""
        gradient = self.parameter.grad
        return gradient is not None and self.gradient is not None and gradient.data_ptr() != self.gradient.data_ptr()

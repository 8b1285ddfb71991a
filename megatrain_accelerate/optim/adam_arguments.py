"""The constants of one AdamW or Adam step: as the user sets them, and as the kernels take them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math

from megatrain_accelerate.errors import ConfigError


class AdamConstants(ctypes.Structure):
    """Mirror of ``AdamConstants`` in ``csrc/adamw.h``; ctypes rounds each double to float."""

    _fields_ = (
        ("gradient_factor", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("l2", ctypes.c_float),
        ("one_minus_beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("correction2_sqrt", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("negative_step_size", ctypes.c_float),
    )


@dataclasses.dataclass(frozen=True)
class AdamArguments:
    """The constants of one optimizer step.

    Raises:
        ConfigError: a value is outside the range that ``torch.optim.AdamW`` accepts, or ``step`` is below 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Counted from 1: the exponent of the bias correction."""
    clip_factor: float = 1.0
    """Multiplied into the gradient, as fp32, before all else, as ``clip_grad_norm_`` does it."""
    decoupled: bool = True
    """True: AdamW, ``weight *= 1 - lr * weight_decay``. False: Adam, ``grad += weight_decay * weight``."""
    maximize: bool = False
    """Ascend instead of descend: the sign of the gradient is turned after clipping."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "clip_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"AdamArguments.{name} must be finite and not below 0, got {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"AdamArguments.{name} must be in [0, 1), got {value}")
        if self.step < 1:
            raise ConfigError(f"AdamArguments.step counts from 1, got {self.step}")

    @property
    def rounding_seed(self) -> int:
        """32 bits, another number at each step: what the stochastic rounding of bf16 moments begins with."""
        return (self.step * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF

    @functools.lru_cache(maxsize=64)  # noqa: B019 - frozen, small, and asked for by every parameter of a step
    def to_constants(self) -> AdamConstants:
        """The scalars of the loop, in double precision in the order of ``torch/optim/adam.py``, then rounded once."""
        bias_correction1 = 1 - self.beta1**self.step
        bias_correction2 = 1 - self.beta2**self.step
        return AdamConstants(
            gradient_factor=-self.clip_factor if self.maximize else self.clip_factor,
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            l2=0.0 if self.decoupled else self.weight_decay,
            one_minus_beta1=1 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
            correction2_sqrt=bias_correction2**0.5,
            eps=self.eps,
            negative_step_size=-(self.lr / bias_correction1),
        )

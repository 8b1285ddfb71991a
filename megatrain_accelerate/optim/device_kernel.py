"""The step of a unit that lives on the device: the arithmetic of ``csrc/adamw.h`` as a Triton kernel, bit for bit.

The same fused multiply-adds, correctly rounded square root and divisions, and no others: contraction is switched off, so
that where a layer's states lie never changes a weight.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import torch

from megatrain_accelerate.errors import KernelError
from megatrain_accelerate.optim.kernel import AdamArguments, AdamConstants, HostKernels
from megatrain_accelerate.optim.moments import FloatMoments, Moments

_BLOCK = 1024


def device_kernels(device: torch.device, host_kernels: HostKernels) -> StepKernels:
    """The kernels for units that live on ``device``: on the CPU stand-in the host's own.

    Raises:
        KernelError: Triton is missing.
    """
    if device.type == "cpu":
        return host_kernels
    if not can_step_on(device):
        raise KernelError(
            "optimizer states on the GPU need Triton, which this torch has not; install it (`pip install triton`), or set "
            "megatrain_config.device_layers to 0"
        )
    return DeviceKernels()


def can_step_on(device: torch.device) -> bool:
    """Whether optimizer states can live on ``device``."""
    return device.type == "cpu" or importlib.util.find_spec("triton") is not None


class DeviceKernels:
    """The kernels for CUDA tensors. Each call is issued on the current stream; all tensors of one are contiguous.

    Each method does what that of :class:`HostKernels` does.
    """

    def __init__(self) -> None:
        from megatrain_accelerate.optim import triton_adamw

        self._triton: Any = triton_adamw

    def adamw(
        self,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        moments: Moments,
        grad: torch.Tensor,
        arguments: AdamArguments,
        grad_residual: torch.Tensor | None = None,
        first_element: int = 0,
    ) -> None:
        assert isinstance(moments, FloatMoments), "8-bit ones are stepped on the host"
        constants = arguments.to_constants()
        if not (count := weight.numel()):
            return
        # bf16 is read as bits: the kernel joins and splits the master itself.
        weight, exp_avg, exp_avg_sq, grad = map(_bits, (weight, *moments, grad))
        # What the kernel doesn't read stands for what there isn't.
        tensors = (weight, weight if residual is None else residual, exp_avg, exp_avg_sq, grad)
        with torch.cuda.device_of(weight):  # Triton launches on the current device
            self._triton.adamw[(-(-count // _BLOCK),)](
                *tensors,
                grad if grad_residual is None else grad_residual,
                count,
                *(getattr(constants, name) for name, _ in AdamConstants._fields_),
                _as_signed(first_element),
                _as_signed(arguments.rounding_seed),
                SPLIT=residual is not None,
                GRAD_SPLIT=grad_residual is not None,
                BF16_MOMENTS=moments.exp_avg.dtype == torch.bfloat16,
                HAS_L2=not arguments.decoupled,
                SMALL_STEP=constants.one_minus_beta1 < 0.5,
                BLOCK=_BLOCK,
                enable_fp_fusion=False,
            )

    def accumulate_split(self, hi: torch.Tensor, residual: torch.Tensor, src: torch.Tensor, has_residual: bool) -> None:
        if count := hi.numel():
            tensors = (_bits(hi), residual, _bits(src))
            blocks = (-(-count // _BLOCK),)
            with torch.cuda.device_of(hi):
                self._triton.accumulate_split[blocks](*tensors, count, HAS_RESIDUAL=has_residual, BLOCK=_BLOCK)

    def norm_split(self, hi: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """2-norm, fp32 without dimensions, of the fp32 values that (N) ``hi`` and ``residual`` stand for.

        Added up in double, so that it is the one that the host computes for a unit there.
        """
        count = hi.numel()
        blocks = -(-count // _BLOCK)
        sums = torch.zeros(blocks, dtype=torch.float64, device=hi.device)
        if count:
            with torch.cuda.device_of(hi):
                self._triton.square_sums_split[(blocks,)](hi.view(torch.int16), residual, sums, count, BLOCK=_BLOCK)
        return sums.sum().sqrt().float()

    def split(self, master_fp32: torch.Tensor, hi: torch.Tensor, residual: torch.Tensor) -> None:
        bits = master_fp32.contiguous().view(torch.int32)
        # Integers wrap when they are narrowed, as in C++.
        hi.view(torch.int16).copy_(((bits + 0x8000) >> 16).to(torch.int16))
        residual.copy_(bits.to(torch.int16))

    def join(self, hi: torch.Tensor, residual: torch.Tensor, master_fp32_out: torch.Tensor) -> None:
        bits = (hi.view(torch.int16).to(torch.int32) << 16) + residual.to(torch.int32)
        master_fp32_out.view(torch.int32).copy_(bits)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A bf16 tensor as the bits that the kernels work on; an fp32 one as it is."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _as_signed(number: int) -> int:
    """The 32-bit integer of the same bits: one type for the kernel, whatever the number."""
    return ctypes.c_int32(number).value


StepKernels = HostKernels | DeviceKernels
"""The kernels of a unit's home: both have the same methods for what a unit needs."""

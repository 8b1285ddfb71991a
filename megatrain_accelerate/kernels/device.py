"""Kernels on the device. The step of units that live there has the bits of the host's: it is ``csrc/adamw.h`` in Triton, with
the same fused multiply-adds and no others, since contraction is off, and correctly rounded square roots and divisions. The
mean of the ranks' gradients has the bits of its PyTorch version."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatrain_accelerate.errors import KernelError
from megatrain_accelerate.kernels.host import AdamConstants, HostKernels, ParameterStep
from megatrain_accelerate.kernels.moments import FloatMoments

_BLOCK = 1024
_CHUNK = 4 * _BLOCK
"""Elements that one Triton program steps."""
_PIECE_ELEMENTS = 1 << 24
"""Elements that masters are split or joined at a time: with up to 16 bytes of temporaries each, 256 MiB."""
_LOGITS_BLOCK = 8192
_LOGITS_OF_A_WARP = 512
"""Logits that a program (of 16 warps), or one of its warps, holds at a time. Of the sizes that were tried on an H200 these are
the fastest: 0.51 ms for 1,664 tokens of a vocabulary of 151,936."""
_launches = threading.Lock()
"""Serialises launches: two threads step on the device, and the first launch compiles."""


def device_kernels(device: torch.device, host_kernels: HostKernels) -> StepKernels:
    """The kernels for units on ``device``: on the CPU stand-in the host's own. A ``KernelError`` for a GPU without Triton."""
    if device.type == "cpu":
        return host_kernels
    if not can_step_on(device):
        raise KernelError(
            "states on the GPU need Triton: `pip install triton`, or set device_layers and device_states of "
            "megatrain_config.placement to 0"
        )
    return DeviceKernels()


def can_step_on(device: torch.device) -> bool:
    """Whether optimizer states can live on ``device``."""
    return device.type == "cpu" or importlib.util.find_spec("triton") is not None


def mean_of_rows(rows: torch.Tensor, target: torch.Tensor) -> None:
    """Writes the mean of ``rows`` (R, N) to ``target`` (N), of the same dtype. Rows are added in fp32 in their order, by one
    kernel if Triton is installed. Issued on the current stream."""
    count = target.numel()
    if target.is_cuda and can_step_on(target.device):
        from megatrain_accelerate.kernels import triton_adamw

        assert rows.stride(1) == 1
        assert target.is_contiguous()
        with _launches, torch.cuda.device_of(target):
            kernel: Any = triton_adamw.mean_of_rows
            arguments = (rows, target, count, rows.stride(0), 1 / len(rows))
            kernel[(-(-count // _BLOCK),)](*arguments, ROWS=len(rows), BLOCK=_BLOCK, enable_fp_fusion=False)
        return
    total = rows[0].to(torch.float32, copy=True)
    for row in rows[1:]:
        total += row
    target.copy_(total.mul_(1 / len(rows)))


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, wanted: bool
) -> torch.Tensor:
    """Returns the cross entropy (n, fp32) of each token, of which ``target`` (n) has the label or the ``ignore_index``, with
    label ``smoothing``. Overwrites contiguous ``logits`` (n, V) by their gradient if ``wanted``. It needs Triton and valid
    labels, and is issued on the current stream."""
    from megatrain_accelerate.kernels import triton_cross_entropy

    count, vocabulary = logits.shape
    assert logits.is_contiguous()
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    block = min(_LOGITS_BLOCK, 1 << (vocabulary - 1).bit_length())
    arguments = (logits, target.contiguous(), losses, vocabulary, ignore_index, smoothing)
    options = {"HAS_SMOOTHING": smoothing != 0, "WANTS_GRADIENT": wanted, "BLOCK": block}
    if count:
        with _launches, torch.cuda.device_of(logits):
            kernel: Any = triton_cross_entropy.cross_entropy
            warps = max(1, block // _LOGITS_OF_A_WARP)
            kernel[(count,)](*arguments, **options, num_warps=warps, enable_fp_fusion=False)
    return losses


def _in_pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same elements of contiguous tensors of one shape, piece by piece."""
    return zip(*(tensor.view(-1).split(_PIECE_ELEMENTS) for tensor in tensors), strict=True)


class DeviceKernels:
    """Kernels as in :class:`HostKernels`, for contiguous CUDA tensors. Each call is issued on the current stream."""

    def __init__(self) -> None:
        from megatrain_accelerate.kernels import triton_adamw

        self._triton: Any = triton_adamw

    def adamw_of_many(self, steps: Sequence[ParameterStep]) -> None:
        """Steps all parameters, in one launch for each set of constants and dtypes: a launch takes longer than most steps."""
        alike: dict[tuple[Any, ...], list[ParameterStep]] = defaultdict(list)
        for step in steps:
            if step.weight.numel():
                assert isinstance(step.moments, FloatMoments), "8-bit ones are stepped on the host"
                # By identity: parameters with the same constants share the object, and its hash takes long.
                key = (id(step.arguments), step.residual is None, step.grad_residual is None, step.moments.exp_avg.dtype)
                alike[key].append(step)
        for group in alike.values():
            with _launches, torch.cuda.device_of(group[0].weight):  # Triton launches on the current device
                self._launch(group)

    def _launch(self, steps: Sequence[ParameterStep]) -> None:
        first = steps[0]
        constants = first.arguments.constants
        rows, chunks = [], 0
        for step in steps:
            # 0 stands for a missing tensor, which the kernel doesn't read.
            tensors = (step.weight, step.residual, *step.moments, step.grad, step.grad_residual)
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            rows.append([*addresses, step.weight.numel(), step.first_element, chunks])
            chunks += -(-step.weight.numel() // _CHUNK)
        aligned = not any(address % 16 for row in rows for address in row[:6])
        table = torch.tensor(rows, dtype=torch.int64, pin_memory=True).to(first.weight.device, non_blocking=True)
        row_of_chunk = torch.repeat_interleave((table[:, 6] + (_CHUNK - 1)) // _CHUNK, output_size=chunks)
        self._triton.adamw[(chunks,)](
            table,
            row_of_chunk,
            *(getattr(constants, name) for name, *_ in AdamConstants._fields_),
            ctypes.c_int32(first.arguments.rounding_seed).value,  # signed, so that Triton sees one type for all values
            SPLIT=first.residual is not None,
            GRAD_SPLIT=first.grad_residual is not None,
            BF16_MOMENTS=first.moments.exp_avg.dtype == torch.bfloat16,
            HAS_L2=not first.arguments.decoupled,
            SMALL_STEP=constants.one_minus_beta1 < 0.5,
            ALIGNED=aligned,
            COLUMNS=len(rows[0]),
            CHUNK=_CHUNK,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )

    def accumulate_split(self, hi: torch.Tensor, residual: torch.Tensor, src: torch.Tensor, has_residual: bool) -> None:
        if count := hi.numel():
            tensors = (hi.view(torch.int16), residual, src.view(torch.int16))
            blocks = (-(-count // _BLOCK),)
            with torch.cuda.device_of(hi):
                self._triton.accumulate_split[blocks](*tensors, count, HAS_RESIDUAL=has_residual, BLOCK=_BLOCK)

    def norm_split(self, hi: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """2-norm (fp32) of the fp32 sums join(hi, residual), of (N) elements each, added up in double, as on the host."""
        count = hi.numel()
        blocks = -(-count // _BLOCK)
        sums = torch.zeros(blocks, dtype=torch.float64, device=hi.device)
        if count:
            with torch.cuda.device_of(hi):
                self._triton.square_sums_split[(blocks,)](hi.view(torch.int16), residual, sums, count, BLOCK=_BLOCK)
        return sums.sum().sqrt().float()

    def split(self, master_fp32: torch.Tensor, hi: torch.Tensor, residual: torch.Tensor) -> None:
        for bits, high, low in _in_pieces(master_fp32.contiguous().view(torch.int32), hi.view(torch.int16), residual):
            # Integers wrap when they are narrowed, as in C++.
            high.copy_(((bits + 0x8000) >> 16).to(torch.int16))
            low.copy_(bits.to(torch.int16))

    def join(self, hi: torch.Tensor, residual: torch.Tensor, master_fp32_out: torch.Tensor) -> None:
        for high, low, bits in _in_pieces(hi.view(torch.int16), residual, master_fp32_out.view(torch.int32)):
            bits.copy_((high.to(torch.int32) << 16) + low.to(torch.int32))


StepKernels = HostKernels | DeviceKernels
"""The kernels of the device where a unit lives. Both classes have the methods that a unit needs."""

"""Matrix products of bf16 that are added up in fp32: the sums over tiles round once, at the end."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.layers import token_tiles
from megatrain_accelerate.units import MIB

PART_BYTES = 64 * MIB
"""Bytes of a converted operand, where a product has to be taken in parts."""


@functools.cache
def product_form(device_type: str, dtype: torch.dtype) -> str:
    """How this torch adds a half-precision product to an fp32 matrix on the device. ``addmm``: in one kernel; ``mm``: fp32
    product, then a sum; ``rounded``: the product is rounded first; ``converted``: the operands are converted. Tried out with
    small matrices, since versions differ in which overload takes what; waits for the device the first time."""
    if device_type != "cuda":
        return "converted"
    ones = torch.ones(16, 16, dtype=dtype, device=device_type)
    total = torch.ones(16, 16, device=device_type)
    with contextlib.suppress(RuntimeError, TypeError):
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        return "addmm" if bool((total == 17).all()) else "rounded"
    with contextlib.suppress(RuntimeError, TypeError):
        return "mm" if torch.mm(ones, ones, out_dtype=torch.float32).dtype == torch.float32 else "rounded"
    return "rounded"


_stands_for_gpu = False


def standing_for_a_gpu() -> contextlib.AbstractContextManager[None]:
    """Products of tensors without data are taken as on a GPU while the body runs, though the tensors are the CPU's."""
    return replaced(sys.modules[__name__], "_stands_for_gpu", True)


def runs_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether what makes the tensor is a kernel of a GPU, or is taken as one."""
    return tensor.device.type == "cuda" or (_stands_for_gpu and isinstance(tensor, FakeTensor))


def _form(total: torch.Tensor, dtype: torch.dtype) -> str:
    if total.dtype == dtype:
        return "converted"  # by nothing at all
    # Not every torch knows the shapes of `out_dtype` without data; a part's temporary is small in the prediction.
    return "rounded" if isinstance(total, FakeTensor) and runs_on_gpu(total) else product_form(total.device.type, dtype)


def parts(total: torch.Tensor, dtype: torch.dtype, rows: int, width: int) -> Iterator[slice]:
    """Slices of ``rows`` in which products of ``dtype`` go to ``total``: temporaries of ``width`` columns stay small."""
    whole = total.dtype == dtype or _form(total, dtype) == "addmm"
    step = rows if whole else max(1, PART_BYTES // (4 * width))
    for begin in token_tiles.tiles(range(0, rows, step)):
        yield slice(begin, min(begin + step, rows))


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, in place, summed in the dtype of ``total``. On CUDA since torch 2.8 the product of
    half-precision operands comes in fp32 from the tensor cores. Before that it is rounded once for each call there; on the CPU
    the operands are converted. ``total`` is fp32 or of their dtype."""
    form = _form(total, left.dtype)
    if form == "addmm":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif form == "mm":
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    elif form == "rounded":
        total.add_(torch.mm(left, right))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))

"""Adds bf16 matrix products up in fp32, so that sums over tiles are rounded only once."""

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
"""Bytes of an fp32 temporary, for products that need one and are computed in parts."""


@functools.cache
def product_form(device_type: str, dtype: torch.dtype) -> str:
    """How this torch adds a half-precision product to an fp32 matrix on the device: in one kernel (``addmm``), by an fp32
    product and a sum (``mm``), by a ``rounded`` product and a sum, or with ``converted`` operands. It is tried out on small
    matrices, since versions differ in what overloads take, and waits for the device the first time."""
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
    """Makes products of fake CPU tensors run as on a GPU in the body."""
    return replaced(sys.modules[__name__], "_stands_for_gpu", True)


def runs_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or is a fake one that stands for a tensor there."""
    return tensor.device.type == "cuda" or (_stands_for_gpu and isinstance(tensor, FakeTensor))


def _form(total: torch.Tensor, dtype: torch.dtype) -> str:
    if total.dtype == dtype:
        return "converted"  # a conversion to the same dtype does nothing
    # Not every torch can run `out_dtype` on fake tensors. The temporary of one part hardly counts in the estimate.
    return "rounded" if isinstance(total, FakeTensor) and runs_on_gpu(total) else product_form(total.device.type, dtype)


def parts(total: torch.Tensor, dtype: torch.dtype, rows: int, width: int) -> Iterator[slice]:
    """Slices of ``rows`` by which to add products of ``dtype`` to ``total``, so that fp32 temporaries of a slice, of ``width``
    columns, take :data:`PART_BYTES` at most. One slice if no temporaries are needed."""
    whole = total.dtype == dtype or _form(total, dtype) == "addmm"
    step = rows if whole else max(1, PART_BYTES // (4 * width))
    for begin in token_tiles.tiles(range(0, rows, step)):
        yield slice(begin, min(begin + step, rows))


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, in place, summed in the dtype of ``total``, which is fp32 or that of the operands. On CUDA
    half-precision products are fp32 since torch 2.8, before that rounded once for each call. The CPU converts operands."""
    form = _form(total, left.dtype)
    if form == "addmm":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif form == "mm":
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    elif form == "rounded":
        total.add_(torch.mm(left, right))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))

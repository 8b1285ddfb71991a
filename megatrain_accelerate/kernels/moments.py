"""AdamW's moments in memory: in fp32, in bf16, or in 8 bits, as codes with one fp32 scale for each block
(``csrc/adamw_int8_moments.h``). The kernel rounds stochastically. What is taken over from fp32 here is rounded to nearest, so
that decoded codes are encoded to the same codes and scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

BLOCK_ELEMENTS = 128
"""Elements that share a scale. Parameters are aligned to as many in a unit, so that no block holds two parameters."""

_FIRST_OFFSET, _SECOND_OFFSET = 0x3F8 - 127, 0x3F8 - 255
_LEAST_FIRST_SCALE, _LEAST_SECOND_SCALE = 2.0**-46, 2.0**-92
_CHUNK_ELEMENTS = 32_768 * BLOCK_ELEMENTS
"""Elements that are decoded or encoded at a time, so that the temporaries of a large parameter stay small."""


def block_count(elements: int) -> int:
    """Number of scales of a moment with that many elements. The last block may be short."""
    return -(-elements // BLOCK_ELEMENTS)


def moment_bytes(elements: int, dtype: torch.dtype) -> int:
    """Bytes of both moments of that many elements, with the scales of int8 ones."""
    scales = 2 * torch.float32.itemsize * block_count(elements) if dtype == torch.int8 else 0
    return 2 * dtype.itemsize * elements + scales


class FloatMoments(NamedTuple):
    """Both moments of N adjacent elements, of any shape, in fp32 or bf16, as views of their unit's memory."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def run(self, first: int, count: int) -> FloatMoments:
        """``count`` elements from ``first`` on, of flat moments."""
        return FloatMoments(self.exp_avg[first : first + count], self.exp_avg_sq[first : first + count])


class Int8Moments(NamedTuple):
    """Both moments of N adjacent elements, of any shape, as views of their unit's memory. The first one begins a block. Codes
    are int8 and uint8. Scales are float32, :func:`block_count` of N for each moment."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    exp_avg_scale: torch.Tensor
    exp_avg_sq_scale: torch.Tensor

    def run(self, first: int, count: int) -> Int8Moments:
        """``count`` elements from ``first`` on, a multiple of the block, of flat moments."""
        blocks = slice(first // BLOCK_ELEMENTS, first // BLOCK_ELEMENTS + block_count(count))
        elements = slice(first, first + count)
        scales = self.exp_avg_scale[blocks], self.exp_avg_sq_scale[blocks]
        return Int8Moments(self.exp_avg[elements], self.exp_avg_sq[elements], *scales)

    def _chunks(self) -> Iterator[tuple[slice, Int8Moments]]:
        flat = Int8Moments(self.exp_avg.view(-1), self.exp_avg_sq.view(-1), self.exp_avg_scale, self.exp_avg_sq_scale)
        for first in range(0, len(flat.exp_avg), _CHUNK_ELEMENTS):
            yield slice(first, first + _CHUNK_ELEMENTS), flat.run(first, _CHUNK_ELEMENTS)  # the last one may be short

    def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the moments with which the next step begins, bit for bit: new fp32 tensors of the codes' shape."""
        exp_avg, exp_avg_sq = torch.empty(self.exp_avg.shape), torch.empty(self.exp_avg.shape)
        for place, chunk in self._chunks():
            firsts, seconds = chunk.exp_avg.int(), chunk.exp_avg_sq.int()
            magnitudes = _shares(firsts.abs(), _FIRST_OFFSET) * _spread(chunk.exp_avg_scale, firsts)
            exp_avg.view(-1)[place] = magnitudes.copysign(firsts)
            exp_avg_sq.view(-1)[place] = _shares(seconds, _SECOND_OFFSET) * _spread(chunk.exp_avg_sq_scale, seconds)
        return exp_avg, exp_avg_sq

    def encode(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        """Takes over moments of the same shape and any floating dtype, each rounded to the nearest code."""
        firsts, seconds = exp_avg.reshape(-1), exp_avg_sq.reshape(-1)
        for place, chunk in self._chunks():
            values = firsts[place].to("cpu", torch.float32)
            codes = _codes(values.abs(), chunk.exp_avg_scale, _LEAST_FIRST_SCALE, _FIRST_OFFSET)
            chunk.exp_avg.copy_(torch.where(values < 0, -codes, codes))
            values = seconds[place].to("cpu", torch.float32)
            codes = _codes(values, chunk.exp_avg_sq_scale, _LEAST_SECOND_SCALE, _SECOND_OFFSET)
            chunk.exp_avg_sq.copy_(torch.where(values > 0, codes.clamp(min=1), codes))


Moments = FloatMoments | Int8Moments
ViewOf = Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes a view of memory from an offset in bytes, a shape and a dtype."""


def moments_within(view_of: ViewOf, total: int, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Moments:
    """Views of some elements' moments in memory that holds those of ``total`` elements: all of the first moment, all of the
    second, and with int8 all scales of the first and all of the second. ``first`` is the first element wanted, with int8 a
    multiple of the block. ``shape`` and ``dtype`` (fp32, bf16 or int8) are those of the elements wanted."""
    if dtype != torch.int8:
        return FloatMoments(*(view_of(dtype.itemsize * (begin + first), shape, dtype) for begin in (0, total)))
    scales = 2 * total + 4 * block_count(first)
    blocks = (block_count(math.prod(shape)),)
    return Int8Moments(
        view_of(first, shape, torch.int8),
        view_of(total + first, shape, torch.uint8),
        view_of(scales, blocks, torch.float32),
        view_of(scales + 4 * block_count(total), blocks, torch.float32),
    )


def _shares(codes: torch.Tensor, offset: int) -> torch.Tensor:
    """The shares of the scale, (N) fp32 in [0, 1], that (N) int32 codes without sign stand for."""
    return torch.where(codes == 0, 0.0, ((codes + offset) << 20).view(torch.float32))


def _spread(scales: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """The scale of each of the (N) elements."""
    return scales.repeat_interleave(BLOCK_ELEMENTS)[: len(elements)]


def _codes(magnitudes: torch.Tensor, scales: torch.Tensor, least_scale: float, offset: int) -> torch.Tensor:
    """Returns the nearest codes, int32, of (N) non-negative fp32 numbers, and writes the scales of their blocks."""
    padded = torch.nn.functional.pad(magnitudes, (0, -len(magnitudes) % BLOCK_ELEMENTS))
    scales.copy_(padded.view(-1, BLOCK_ELEMENTS).amax(1).clamp(min=least_scale))
    shares = (magnitudes / _spread(scales, magnitudes)).nan_to_num(1.0)
    codes = ((shares.view(torch.int32) + (1 << 19)) >> 20) - offset
    least = _shares(torch.ones(1, dtype=torch.int32), offset)
    return torch.where(shares < least, (shares > 0.5 * least).int(), codes)

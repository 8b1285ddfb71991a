# mypy: ignore-errors
"""Triton kernels of AdamW and Adam, of fp32 gradient sums, and of means of gradients. ``csrc/adamw.h`` and
``csrc/split_master.h`` have the formulas of the first two, their sources and the reason of each rounding. AdamW must be
launched with ``enable_fp_fusion=False``, so that only the multiply-adds written here are fused."""

import triton
import triton.language as tl


@triton.jit
def _load_moment(at, inside, BF16_MOMENTS: tl.constexpr):
    """Loads fp32 moments, or the bits (int16) of bf16 ones, as fp32."""
    # A single return, since Triton also compiles what follows an ``if`` that returns.
    if BF16_MOMENTS:
        moment = (tl.load(at, inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        moment = tl.load(at, inside, other=0.0)
    return moment


@triton.jit
def _rounding_bits(at, first_element, seed):
    """``rounding_bits`` of ``csrc/adamw.h``."""
    x = (at + first_element).to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x


@triton.jit
def _store_moment(at, value, inside, random, BF16_MOMENTS: tl.constexpr):
    """Stores an fp32 moment, as it is or rounded stochastically to the bits of a bf16 one. ``random`` is below 2**16."""
    if BF16_MOMENTS:
        tl.store(at, ((value.to(tl.uint32, bitcast=True) + random) >> 16).to(tl.int16), inside)
    else:
        tl.store(at, value, inside)


@triton.jit
def _join_sum(hi, lo):
    """Joins the halves (int32) of fp32 sums. A negative residual beside a zero is stale, see ``csrc/split_master.h``."""
    is_stale = ((hi & 0x7FFF) == 0) & (lo < 0)
    return ((hi << 16) + tl.where(is_stale, 0, lo)).to(tl.float32, bitcast=True)


@triton.jit
def _pointer(row_ptr, column: tl.constexpr, IS_INT16: tl.constexpr, ALIGNED: tl.constexpr):
    """Loads an address of int16 or fp32 numbers from a row of the table. ``ALIGNED``: it is a multiple of 16 bytes."""
    pointer = tl.load(row_ptr + column).to(tl.pointer_type(tl.int16) if IS_INT16 else tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["seed"])
def adamw(
    table_ptr,
    row_of_chunk_ptr,
    factor,
    decay,
    l2,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    correction2_sqrt,
    eps,
    negative_step_size,
    seed,
    SPLIT: tl.constexpr,
    GRAD_SPLIT: tl.constexpr,
    BF16_MOMENTS: tl.constexpr,
    HAS_L2: tl.constexpr,
    SMALL_STEP: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Steps many parameters. Each program steps a chunk of one, whose row in the (rows, COLUMNS) int64 ``table`` is
    ``row_of_chunk[program]``.

    A row has the addresses of weight, residual, both moments, gradient and the gradient's residual, then the number of
    elements, the first one's index in its unit, and the parameter's first chunk. With ``SPLIT`` weights and gradients are
    bf16 and the masters' residuals int16, all as int16 bits. Without it weights and gradients are fp32. With ``GRAD_SPLIT``
    the gradient is an fp32 sum and has a residual. With ``BF16_MOMENTS`` moments are the bits of bf16 numbers.
    """
    row_ptr = table_ptr + tl.load(row_of_chunk_ptr + tl.program_id(0)) * COLUMNS
    weight_ptr = _pointer(row_ptr, 0, SPLIT, ALIGNED)
    lo_ptr = _pointer(row_ptr, 1, True, ALIGNED)
    m_ptr = _pointer(row_ptr, 2, BF16_MOMENTS, ALIGNED)
    v_ptr = _pointer(row_ptr, 3, BF16_MOMENTS, ALIGNED)
    grad_ptr = _pointer(row_ptr, 4, SPLIT, ALIGNED)
    grad_lo_ptr = _pointer(row_ptr, 5, True, ALIGNED)
    count, first_element = tl.load(row_ptr + 6), tl.load(row_ptr + 7)
    start = (tl.program_id(0) - tl.load(row_ptr + 8)) * CHUNK
    for begin in range(0, CHUNK, BLOCK):
        at = start + begin + tl.arange(0, BLOCK)
        random = _rounding_bits(at, first_element, seed)
        left = count - start - begin
        for IS_LAST in tl.static_range(2):
            if (left > 0) & (left < BLOCK) if IS_LAST else left >= BLOCK:
                # With a mask that is known to be all ones Triton loads several elements at once.
                inside = at < count if IS_LAST else tl.full([BLOCK], 1, tl.int1)
                if SPLIT:
                    hi = tl.load(weight_ptr + at, inside, other=0).to(tl.int32)
                    lo = tl.load(lo_ptr + at, inside, other=0).to(tl.int32)
                    weight = ((hi << 16) + lo).to(tl.float32, bitcast=True)
                    grad_hi = tl.load(grad_ptr + at, inside, other=0).to(tl.int32)
                    if GRAD_SPLIT:
                        grad = _join_sum(grad_hi, tl.load(grad_lo_ptr + at, inside, other=0).to(tl.int32))
                    else:
                        grad = (grad_hi << 16).to(tl.float32, bitcast=True)
                else:
                    weight = tl.load(weight_ptr + at, inside, other=0.0)
                    grad = tl.load(grad_ptr + at, inside, other=0.0)
                m = _load_moment(m_ptr + at, inside, BF16_MOMENTS)
                v = _load_moment(v_ptr + at, inside, BF16_MOMENTS)
                grad = grad * factor
                if HAS_L2:
                    grad = tl.fma(weight, l2, grad)
                else:
                    weight = weight * decay
                difference = grad - m
                m = tl.fma(difference, one_minus_beta1, m) if SMALL_STEP else tl.fma(difference, one_minus_beta1 - 1.0, grad)
                v = tl.fma(grad * one_minus_beta2, grad, v * beta2)
                denominator = tl.div_rn(tl.sqrt_rn(v), correction2_sqrt) + eps
                weight = weight + tl.div_rn(m * negative_step_size, denominator)
                _store_moment(m_ptr + at, m, inside, random & 0xFFFF, BF16_MOMENTS)
                _store_moment(v_ptr + at, v, inside, random >> 16, BF16_MOMENTS)
                if SPLIT:
                    bits = weight.to(tl.int32, bitcast=True)
                    tl.store(weight_ptr + at, ((bits + 0x8000) >> 16).to(tl.int16), inside)
                    tl.store(lo_ptr + at, bits.to(tl.int16), inside)
                else:
                    tl.store(weight_ptr + at, weight, inside)


@triton.jit
def accumulate_split(hi_ptr, lo_ptr, source_ptr, count, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """Adds ``source`` to sums in fp32. ``hi`` and ``source`` are bits (int16) of bf16 numbers, ``lo`` residuals (int16)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    hi = tl.load(hi_ptr + at, inside, other=0).to(tl.int32)
    new = (tl.load(source_ptr + at, inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if HAS_RESIDUAL:
        earlier = _join_sum(hi, tl.load(lo_ptr + at, inside, other=0).to(tl.int32))
    else:
        earlier = (hi << 16).to(tl.float32, bitcast=True)
    total = earlier + new
    bits = tl.where(total != total, 0x7FC00000, total.to(tl.int32, bitcast=True))
    tl.store(hi_ptr + at, ((bits + 0x8000) >> 16).to(tl.int16), inside)
    tl.store(lo_ptr + at, bits.to(tl.int16), inside)


@triton.jit
def square_sums_split(hi_ptr, lo_ptr, sums_ptr, count, BLOCK: tl.constexpr):
    """Writes the sum of squares of the split fp32 numbers of each block to ``sums`` (fp64)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    hi = tl.load(hi_ptr + at, inside, other=0).to(tl.int32)
    lo = tl.load(lo_ptr + at, inside, other=0).to(tl.int32)
    value = _join_sum(hi, lo).to(tl.float64)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(value * value, 0))


@triton.jit
def mean_of_rows(row_ptr, target_ptr, count, stride, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(row_ptr + at, inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, ROWS):
        row_ptr += stride
        total += tl.load(row_ptr + at, inside, other=0.0).to(tl.float32)
    tl.store(target_ptr + at, (total * scale).to(target_ptr.dtype.element_ty), inside)

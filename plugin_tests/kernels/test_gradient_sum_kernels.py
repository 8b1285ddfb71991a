"""The host kernels of split fp32 gradient sums against one-number-at-a-time references."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatrain_accelerate.errors import KernelError
from megatrain_accelerate.kernels.host import INSTRUCTION_SETS, AdamArguments, HostKernels
from megatrain_accelerate.kernels.moments import FloatMoments

# Every tail of a 16-wide vector, more than one chunk (131,072) with a tail, and nothing at all.
LENGTHS = (0, 1, 7, 15, 16, 17, 1000, 300001)
PLAIN = AdamArguments(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
QUIET_NAN = 0x7FC00000


def all_kernels() -> list[HostKernels]:
    """One and three threads, every instruction set that this machine has."""
    found = []
    for instruction_set in INSTRUCTION_SETS:
        for threads in (1, 3):
            try:
                found.append(HostKernels(threads, instruction_set))
            except KernelError:  # this machine can't run it
                continue
    return found


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern: normal, denormal, infinite, NaN."""
    low, high = (-(2**15), 2**15) if dtype == torch.int16 else (-(2**31), 2**31)
    values = np.random.default_rng(seed).integers(low, high, count)
    return torch.from_numpy(values.astype(np.int16 if dtype == torch.int16 else np.int32))


def split_by_hand(bits: int) -> tuple[int, int]:
    """(hi, lo) as unsigned 16-bit numbers, by the definition in csrc/split_master.h."""
    return ((bits + 0x8000) & 0xFFFFFFFF) >> 16, bits & 0xFFFF


def add_by_hand(hi: int, lo: int | None, new: int) -> tuple[int, int]:
    """One element: the sum so far and the new gradient as fp32 numbers, added by numpy, split again."""
    low = 0 if lo is None else lo - 0x10000 if lo & 0x8000 else lo
    if hi & 0x7FFF == 0:  # somebody zeroed the gradient: a negative residual isn't the sum's
        low = max(low, 0)
    earlier = np.uint32(((hi << 16) + low) & 0xFFFFFFFF).view(np.float32)
    with np.errstate(all="ignore"):
        total = np.float32(earlier + np.uint32(new << 16).view(np.float32))
    return split_by_hand(QUIET_NAN if np.isnan(total) else int(total.view(np.uint32)))


def with_zeros(bits: torch.Tensor) -> torch.Tensor:
    """Every fourth number a zero, of both signs."""
    bits[::4] = 0
    bits[1::8] = -0x8000
    return bits


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("count", [0, 1, 17, 20011])
def test_accumulate_split_is_an_fp32_addition_of_every_bit_pattern(count: int, has_residual: bool) -> None:
    hi, lo, new = (random_bits(count, torch.int16, seed) for seed in (1, 2, 3))
    hi = with_zeros(hi)
    expected = [
        add_by_hand(high & 0xFFFF, low & 0xFFFF if has_residual else None, add & 0xFFFF)
        for high, low, add in zip(hi.tolist(), lo.tolist(), new.tolist(), strict=True)
    ]
    for kernels in all_kernels():
        ours_hi, ours_lo = hi.clone(), lo.clone()
        kernels.accumulate_split(ours_hi.view(torch.bfloat16), ours_lo, new.view(torch.bfloat16), has_residual)
        found = [(high & 0xFFFF, low & 0xFFFF) for high, low in zip(ours_hi.tolist(), ours_lo.tolist(), strict=True)]
        assert found == expected
        kernels.close()


def test_a_sum_that_is_not_a_number_shows_in_its_bf16_half() -> None:
    kernels = HostKernels(1)
    hi = torch.tensor([float("nan"), float("inf"), 1.0, float("inf")], dtype=torch.bfloat16)
    lo = torch.tensor([-1, 0, 5, 0], dtype=torch.int16)
    kernels.accumulate_split(hi, lo, torch.tensor([1.0, -float("inf"), float("nan"), 1.0], dtype=torch.bfloat16), True)
    assert hi.isnan().tolist() == [True, True, True, False]
    assert hi[3] == float("inf")
    kernels.close()


def test_a_residual_beside_a_gradient_that_was_zeroed_is_no_nan() -> None:
    kernels = HostKernels(1)
    hi, lo = torch.zeros(4, dtype=torch.bfloat16), torch.tensor([-1, -30000, 30000, 0], dtype=torch.int16)
    # Positive ones are the bits of a denormal number below 5e-41.
    assert kernels.square_sum(hi, lo) < 1e-80
    state = [torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16), torch.zeros(4), torch.zeros(4)]
    kernels.adamw(*state[:2], FloatMoments(*state[2:]), hi, PLAIN, lo)
    assert all(bool(tensor.isfinite().all()) for tensor in state)
    kernels.accumulate_split(hi, lo, torch.ones(4, dtype=torch.bfloat16), True)
    assert hi.tolist() == [1.0] * 4
    assert lo.tolist() == [0] * 4
    kernels.close()


def test_additions_that_bf16_loses_are_kept() -> None:
    kernels = HostKernels(1)
    hi, lo = torch.ones(40, dtype=torch.bfloat16), torch.zeros(40, dtype=torch.int16)
    rounded, total = hi.clone(), torch.empty(40)
    small = torch.full((40,), 2.0**-10, dtype=torch.bfloat16)
    for _ in range(64):
        kernels.accumulate_split(hi, lo, small, True)
        kernels.accumulate(rounded, small)
    kernels.join(hi, lo, total)
    assert torch.equal(total, torch.full((40,), 1.0 + 64 * 2.0**-10))
    assert torch.equal(hi.float(), total), "the sum is a bf16 number here"
    assert torch.equal(rounded, torch.ones(40, dtype=torch.bfloat16)), "or the test shows nothing"
    kernels.close()


@pytest.mark.parametrize("count", LENGTHS)
def test_elements_next_to_the_sums_are_not_written(count: int) -> None:
    kernels = HostKernels(3)
    hi = torch.full((count + 2,), 7, dtype=torch.bfloat16)
    lo = torch.full((count + 2,), 7, dtype=torch.int16)
    kernels.accumulate_split(hi[1:-1], lo[1:-1], torch.ones(count, dtype=torch.bfloat16), True)
    assert hi[0] == hi[-1] == lo[0] == lo[-1] == 7
    assert (hi[1:-1] == 8).all()
    kernels.close()


@pytest.mark.parametrize("count", LENGTHS)
def test_square_sum_is_that_of_the_joined_numbers(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    results = set()
    for kernels in all_kernels():
        hi, lo = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
        kernels.split(values, hi, lo)
        results.add(kernels.square_sum(hi, lo))
        assert kernels.square_sum(hi, lo) == kernels.square_sum(values)
        kernels.close()
    assert len(results) == 1
    # Half an ulp of a double for each of the additions.
    assert results.pop() == pytest.approx(float(values.double().square().sum()), rel=count * 1.2e-16 + 1e-15, abs=0)


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_step_from_a_split_gradient_has_the_bits_of_one_from_the_fp32_gradient(count: int, decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    master = torch.randn(count, generator=generator) * 0.02
    for kernels in all_kernels():
        hi, lo = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
        kernels.split(master, hi, lo)
        split, plain = (
            [hi, lo, torch.zeros(count), torch.zeros(count)],
            [master.clone(), torch.zeros(count), torch.zeros(count)],
        )
        grad_hi, grad_lo = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
        for step in range(1, 4):
            gradient = torch.randn(count, generator=torch.Generator().manual_seed(step))
            kernels.split(gradient, grad_hi, grad_lo)
            arguments = dataclasses.replace(PLAIN, step=step, clip_factor=0.37, decoupled=decoupled)
            kernels.adamw(*split[:2], FloatMoments(*split[2:]), grad_hi, arguments, grad_lo)
            kernels.adamw(plain[0], None, FloatMoments(*plain[1:]), gradient, arguments)
        joined = torch.empty(count)
        kernels.join(split[0], split[1], joined)
        for ours, theirs in zip((joined, *split[2:]), plain, strict=True):
            assert torch.equal(ours, theirs)
        kernels.close()


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    kernels = HostKernels(1)
    hi, lo = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int16)
    with pytest.raises(KernelError, match=r"src must be torch\.bfloat16, got torch\.float32"):
        kernels.accumulate_split(hi, lo, torch.zeros(8), True)
    with pytest.raises(KernelError, match=r"residual has 7 elements and values has 8"):
        kernels.square_sum(hi, lo[:7])
    moments = FloatMoments(torch.zeros(8), torch.zeros(8))
    with pytest.raises(KernelError, match=r"grad_residual must be torch\.int16, got torch\.float32"):
        kernels.adamw(hi, lo, moments, hi.clone(), PLAIN, torch.zeros(8))
    kernels.close()

"""Moments in 8 bits: the kernel against a reference in plain numpy, its rounding, its codes' way to fp32 and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from moment_runs import arguments, rounding_bits

from megatrain_accelerate.errors import KernelError
from megatrain_accelerate.kernels.host import INSTRUCTION_SETS, HostKernels
from megatrain_accelerate.kernels.moments import BLOCK_ELEMENTS, FloatMoments, Int8Moments, block_count

COUNT = 2 * 128 * 1024 + 3 * BLOCK_ELEMENTS + 77
"""Several chunks for several threads, and a short block."""


@pytest.fixture(scope="module")
def kernels() -> Iterator[HostKernels]:
    made = HostKernels(threads=3)
    yield made
    made.close()


def zeros(count: int = COUNT) -> Int8Moments:
    codes = torch.zeros(count, dtype=torch.int8), torch.zeros(count, dtype=torch.uint8)
    return Int8Moments(*codes, torch.zeros(block_count(count)), torch.zeros(block_count(count)))


def copied(moments: Int8Moments) -> Int8Moments:
    return Int8Moments(*(tensor.clone() for tensor in moments))


def values(seed: int) -> tuple[torch.Tensor, torch.Tensor, Int8Moments]:
    """Weights, gradients and moments; magnitudes of elements, and of blocks, spread over many powers of ten."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(COUNT, generator=generator)

    spread = normal(2.0).exp() * normal(4.0)[:: 2 * BLOCK_ELEMENTS].exp().repeat_interleave(2 * BLOCK_ELEMENTS)[:COUNT]
    gradient = normal(1e-3) * spread
    gradient[1000:1300] = 0
    moments = zeros()
    moments.encode(normal(1e-3) * spread, (normal(1e-3) * spread).square())
    return normal(0.02), gradient, moments


def stochastic_codes(values: torch.Tensor, random: np.ndarray, last: int, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of fp32 magnitudes, in single precision; ``least`` is the least scale."""
    single = np.float32
    x = values.numpy()
    padded = np.zeros(BLOCK_ELEMENTS * block_count(len(x)), single)
    padded[: len(x)] = x
    scales = np.maximum(padded.reshape(-1, BLOCK_ELEMENTS).max(1), single(least))
    factor = (single(1) / scales) * single(1 + 2.0**-21)
    shares = np.minimum(x * np.repeat(factor, BLOCK_ELEMENTS)[: len(x)], single(1))
    table = shares_of_codes(last)
    lower = np.clip(np.searchsorted(table, shares.astype(np.float64), side="right") - 1, 0, last - 1)
    place = (shares.astype(np.float64) - table[lower]) / (table[lower + 1] - table[lower])
    return lower + (place >= 1 - (random + 0.5) / 65536) * (lower > 0) + (place > (random + 0.5) / 65536) * (
        lower == 0
    ), scales


def shares_of_codes(last: int) -> np.ndarray:
    """Values of the codes 0 to ``last`` in double precision: eight a power of two, down from 1, and zero."""
    below = np.arange(last - 1, -1, -1)
    table = np.where(below % 8 == 0, 1.0, 0.5 + (8 - below % 8) / 16) * 2.0 ** -(below // 8)
    return np.concatenate([[0.0], table])


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("kind", ["split", "split sum", "fp32"])
def test_the_step_is_that_of_fp32_moments_and_the_codes_are_rounded_by_the_hash(
    kernels: HostKernels, kind: str, decoupled: bool
) -> None:
    settings, first = arguments(5, decoupled=decoupled), 2**32 - 8 * BLOCK_ELEMENTS
    weight, grad, ours = values(1)
    m, v = ours.decode()
    if kind == "fp32":
        expected, found = weight.clone(), weight.clone()
        kernels.adamw(expected, None, FloatMoments(m, v), grad, settings)
        kernels.adamw(found, None, ours, grad, settings, first_element=first)
    else:
        grad_hi, grad_lo = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
        kernels.split(grad, grad_hi, grad_lo)
        of_sum = grad_lo if kind == "split sum" else None
        hi, lo = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
        expected, found = torch.empty(COUNT), torch.empty(COUNT)
        kernels.split(weight, hi, lo)
        kernels.adamw(hi, lo, FloatMoments(m, v), grad_hi, settings, of_sum)
        kernels.join(hi, lo, expected)
        kernels.split(weight, hi, lo)
        kernels.adamw(hi, lo, ours, grad_hi, settings, of_sum, first)
        kernels.join(hi, lo, found)
    assert torch.equal(found, expected)
    random = rounding_bits(COUNT, first, settings.rounding_seed)
    codes, scales = stochastic_codes(m.abs(), random & np.uint32(0xFFFF), 127, 2.0**-46)
    assert np.array_equal(np.where(m.numpy() < 0, -codes, codes), ours.exp_avg.numpy())
    assert np.array_equal(scales, ours.exp_avg_scale.numpy())
    codes, scales = stochastic_codes(v, random >> np.uint32(16), 255, 2.0**-92)
    assert np.array_equal(np.where((codes == 0) & (v.numpy() > 0), 1, codes), ours.exp_avg_sq.numpy())
    assert np.array_equal(scales, ours.exp_avg_sq_scale.numpy())


def test_bits_depend_neither_on_threads_nor_on_the_instruction_set_nor_on_pieces() -> None:
    found = []
    best = HostKernels(threads=1)
    sets = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best.instruction_set) + 1]
    best.close()
    for threads, name, pieces in [*((2, name, 1) for name in sets), (1, None, 1), (2, None, 3)]:
        kernels = HostKernels(threads=threads, instruction_set=name)
        weight, gradient, moments = values(2)
        hi, lo = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
        kernels.split(weight, hi, lo)
        gradient = gradient.bfloat16()
        edges = [COUNT * piece // pieces // BLOCK_ELEMENTS * BLOCK_ELEMENTS for piece in range(pieces)] + [COUNT]
        for begin, end in itertools.pairwise(edges):
            part = slice(begin, end)
            run = moments.run(begin, end - begin)
            kernels.adamw(hi[part], lo[part], run, gradient[part], arguments(3), first_element=begin)
        kernels.close()
        found.append((hi, lo, *moments))
    for tensors in found[1:]:
        for ours, theirs in zip(tensors, found[0], strict=True):
            assert torch.equal(ours, theirs)


def test_moments_are_right_in_the_mean_over_hundreds_of_steps(kernels: HostKernels) -> None:
    steps, count = 300, 1024 * BLOCK_ELEMENTS
    moments = zeros(count)
    v = torch.logspace(-6, 0, BLOCK_ELEMENTS).repeat(count // BLOCK_ELEMENTS) * 2.0**-40
    moments.encode(torch.zeros(count), v)
    start = moments.decode()[1]
    weight, grad = torch.zeros(count), torch.zeros(count)
    for step in range(1, steps + 1):
        kernels.adamw(weight, None, moments, grad, arguments(step))
    found = moments.decode()[1].double().view(-1, BLOCK_ELEMENTS).mean(0)
    expected = start.double()[:BLOCK_ELEMENTS] * 0.999**steps
    # A step moves v by up to an eighth of itself, with the probability that makes 0.001 of it in the mean: 300 of them by
    # sqrt(300 * 0.125 * 0.001) = 0.2, the mean of 1,024 elements by 0.006. To nearest it would stay, 35% above.
    assert float(((found - expected) / expected).abs().max()) < 0.03
    assert float((found / expected).mean()) == pytest.approx(1.0, abs=2e-3)


def test_a_second_moment_above_zero_never_becomes_zero(kernels: HostKernels) -> None:
    moments, weight = zeros(), torch.zeros(COUNT)
    gradient = torch.full((COUNT,), 1e-9)
    gradient[::BLOCK_ELEMENTS] = 1.0
    gradient[5::BLOCK_ELEMENTS] = 0.0
    for step in range(1, 20):
        kernels.adamw(weight, None, moments, gradient, arguments(step, weight_decay=0.0, eps=1e-12))
    codes = moments.exp_avg_sq.bool()
    assert torch.equal(codes, gradient > 0)
    # Not lr * m / eps = 1: the least m over the root of the least v is about 1, with the bias corrections below 2.
    assert float(weight[1:5].abs().max()) < 20 * 1e-3 * 2


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12])
def test_codes_that_are_decoded_and_coded_again_are_the_same(kernels: HostKernels, scale: float) -> None:
    weight, gradient, moments = values(3)
    for step in range(1, 4):
        kernels.adamw(weight, None, moments, gradient * scale, arguments(step))
    again = zeros()
    again.encode(*moments.decode())
    for ours, theirs in zip(again, moments, strict=True):
        assert torch.equal(ours, theirs)


def test_every_code_of_a_block_comes_back() -> None:
    moments = zeros(2 * 255 * BLOCK_ELEMENTS)
    scales = torch.rand(len(moments.exp_avg_scale), generator=torch.Generator().manual_seed(4)) + 1e-3
    codes = torch.arange(moments.exp_avg.numel()) // BLOCK_ELEMENTS
    moments.exp_avg.copy_(codes % 255 - 127)
    moments.exp_avg_sq.copy_(codes % 255 + 1)
    moments.exp_avg[::BLOCK_ELEMENTS], moments.exp_avg_sq[::BLOCK_ELEMENTS] = 127, 255
    moments.exp_avg_scale.copy_(scales)
    moments.exp_avg_sq_scale.copy_(scales)
    again = zeros(moments.exp_avg.numel())
    again.encode(*moments.decode())
    for ours, theirs in zip(again, moments, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_its_block_and_no_other(kernels: HostKernels, bad: float) -> None:
    weight, gradient, moments = values(5)
    before = copied(moments)
    others = copied(moments)
    kernels.adamw(weight.clone(), None, others, gradient, arguments())
    gradient[3 * BLOCK_ELEMENTS + 7] = bad
    kernels.adamw(weight, None, moments, gradient, arguments())
    found = moments.decode()
    block = slice(3 * BLOCK_ELEMENTS, 4 * BLOCK_ELEMENTS)
    for ours, theirs in zip(found, others.decode(), strict=True):
        assert not ours[block].isfinite().any()
        ours[block] = theirs[block]
        assert torch.equal(ours, theirs)
    assert not torch.equal(others.exp_avg, before.exp_avg)


def test_a_run_within_a_block_or_with_too_few_scales_is_refused(kernels: HostKernels) -> None:
    weight, gradient, moments = values(6)
    with pytest.raises(KernelError, match="first_element is 64; 8-bit moments need a multiple of 128"):
        kernels.adamw(weight, None, moments, gradient, arguments(), first_element=64)
    codes = moments.exp_avg, moments.exp_avg_sq
    short = Int8Moments(*codes, moments.exp_avg_scale[1:], moments.exp_avg_sq_scale[1:])
    with pytest.raises(KernelError, match=r"8-bit moments of 262,605 elements have 2,051 scales, not 2,052"):
        kernels.adamw(weight, None, short, gradient, arguments())

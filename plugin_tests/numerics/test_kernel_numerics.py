"""The host AdamW against torch and against a float64 reference, and bit-equality over threads and instruction sets.

Bit-equality with torch needs torch's AVX2 or AVX-512 kernels (its baseline has no FMA) and an IEEE square root in place
of MKL's; the docstring of kernel.py says why. ``exact_torch_sqrt`` provides the second.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import plain_torch
import pytest
import torch

from megatrain_accelerate.kernels.host import INSTRUCTION_SETS, AdamArguments, HostKernels
from megatrain_accelerate.kernels.moments import FloatMoments

# Every tail of a 16-wide vector, more than one chunk (131,072) with a tail, and nothing at all.
LENGTHS = (0, 1, 7, 15, 16, 17, 1000, 65537, 300001)
PLAIN = AdamArguments(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
VARIANTS = {
    "default": PLAIN,
    "no_decay_small_lr": dataclasses.replace(PLAIN, lr=1e-5, beta2=0.95, weight_decay=0.0),
    "clipped": dataclasses.replace(PLAIN, lr=3e-4, weight_decay=0.1, clip_factor=0.37),
    "maximize": dataclasses.replace(PLAIN, eps=1e-6, maximize=True, clip_factor=0.5),
    "lerp_from_the_far_end": dataclasses.replace(PLAIN, beta1=0.3, beta2=0.5, lr=1e-2),
    "no_momentum": dataclasses.replace(PLAIN, beta1=0.0, beta2=0.0, eps=1e-15),
    "l2": dataclasses.replace(PLAIN, decoupled=False, weight_decay=0.1),
    "l2_clipped_maximize": dataclasses.replace(PLAIN, decoupled=False, clip_factor=0.7, maximize=True),
}
needs_vectorised_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's other CPU kernels round differently from its AVX2 and AVX-512 ones",
)


@pytest.fixture(scope="module")
def kernels() -> Iterator[HostKernels]:
    pool = HostKernels(3)
    yield pool
    pool.close()


class State(NamedTuple):
    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def initial_state(count: int, seed: int = 0) -> State:
    weight = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    return State(weight, torch.zeros(count), torch.zeros(count))


def gradients(count: int, steps: int, seed: int = 1) -> list[torch.Tensor]:
    """Gradients that bf16 holds exactly, of magnitudes from 1e-6 to 1 over the steps."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(count, generator=generator) * 10.0 ** -(step % 7)).bfloat16().float() for step in range(steps)]


def run_torch(state: State, grads: list[torch.Tensor], arguments: AdamArguments) -> State:
    parameter = torch.nn.Parameter(state.weight.clone())
    optimizer = (torch.optim.AdamW if arguments.decoupled else torch.optim.Adam)(
        [parameter],
        lr=arguments.lr,
        betas=(arguments.beta1, arguments.beta2),
        eps=arguments.eps,
        weight_decay=arguments.weight_decay,
        maximize=arguments.maximize,
        foreach=False,
        fused=False,
    )
    for grad in grads:
        parameter.grad = grad.clone().mul_(arguments.clip_factor)
        optimizer.step()
    moments = optimizer.state[parameter]
    return State(parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"])


def step_fp32(kernels: HostKernels, state: State, grad: torch.Tensor, arguments: AdamArguments) -> None:
    kernels.adamw(state.weight, None, FloatMoments(state.exp_avg, state.exp_avg_sq), grad, arguments)


def run_fp32(kernels: HostKernels, state: State, grads: list[torch.Tensor], arguments: AdamArguments) -> State:
    result = State(*(tensor.clone() for tensor in state))
    for step, grad in enumerate(grads, 1):
        step_fp32(kernels, result, grad, dataclasses.replace(arguments, step=step))
    return result


def run_split(kernels: HostKernels, state: State, grads: list[torch.Tensor], arguments: AdamArguments) -> State:
    result = State(*(tensor.clone() for tensor in state))
    hi = torch.empty(len(state.weight), dtype=torch.bfloat16)
    residual = torch.empty(len(state.weight), dtype=torch.int16)
    kernels.split(result.weight, hi, residual)
    for step, grad in enumerate(grads, 1):
        numbered = dataclasses.replace(arguments, step=step)
        kernels.adamw(hi, residual, FloatMoments(result.exp_avg, result.exp_avg_sq), grad.bfloat16(), numbered)
    kernels.join(hi, residual, result.weight)
    return result


def assert_equal_states(actual: State, expected: State) -> None:
    for name, one, other in zip(State._fields, actual, expected, strict=True):
        assert torch.equal(one, other), name


@needs_vectorised_torch
@pytest.mark.usefixtures("exact_torch_sqrt")
@pytest.mark.parametrize("count", [length for length in LENGTHS if length])
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_kernels_are_bit_equal_to_torch_over_many_steps(kernels: HostKernels, variant: str, count: int) -> None:
    state, grads = initial_state(count), gradients(count, steps=12)
    expected = run_torch(state, grads, VARIANTS[variant])
    assert_equal_states(run_fp32(kernels, state, grads, VARIANTS[variant]), expected)
    assert_equal_states(run_split(kernels, state, grads, VARIANTS[variant]), expected)


@needs_vectorised_torch
@pytest.mark.usefixtures("exact_torch_sqrt")
def test_bit_equality_with_torch_survives_a_thousand_steps(kernels: HostKernels) -> None:
    state, grads = initial_state(1003), gradients(1003, steps=1000)
    assert_equal_states(run_split(kernels, state, grads, PLAIN), run_torch(state, grads, PLAIN))


@needs_vectorised_torch
def test_against_unpatched_torch_moments_are_equal_and_weights_differ_by_the_square_root_only(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    # MKL's sqrt is off by an ulp (2**-23 relative) for some arguments, how many depends on the processor; the operations
    # after it round what they get, so an update (at most 10 lr here) may change by 2**-22 of itself. The sum with the
    # weight is rounded to an ulp of the weight. Both may happen in each of the steps.
    steps, count = 5, 65537
    off = torch.zeros(count, dtype=torch.bool)
    calls: list[int] = []
    torch_sqrt = torch.Tensor.sqrt

    def recorded_sqrt(tensor: torch.Tensor) -> torch.Tensor:
        root = torch_sqrt(tensor)
        off.logical_or_(root != plain_torch.ieee_sqrt(tensor))
        calls.append(tensor.numel())
        return root

    state, grads = initial_state(count), gradients(count, steps)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", recorded_sqrt)
        expected = run_torch(state, grads, PLAIN)
    assert calls == [count] * steps
    actual = run_split(kernels, state, grads, PLAIN)
    assert torch.equal(actual.exp_avg, expected.exp_avg)
    assert torch.equal(actual.exp_avg_sq, expected.exp_avg_sq)
    assert torch.equal(actual.weight[~off], expected.weight[~off])
    bound = steps * (10 * PLAIN.lr * 2.0**-22 + torch.maximum(state.weight.abs(), expected.weight.abs()) * 2.0**-23)
    assert ((actual.weight - expected.weight).abs() <= bound).all()
    assert (~off).float().mean() > 0.1  # Else the equality above says little.


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_step_is_within_rounding_of_a_float64_reference(kernels: HostKernels, variant: str) -> None:
    count, arguments = 4099, dataclasses.replace(VARIANTS[variant], step=7)
    state, (grad,) = initial_state(count), gradients(count, steps=1)
    state.exp_avg.copy_(torch.randn(count, generator=torch.Generator().manual_seed(2)) * 0.1)
    state.exp_avg_sq.copy_(torch.rand(count, generator=torch.Generator().manual_seed(3)) * 0.1 + 1e-3)
    weight, first, second = (tensor.double() for tensor in state)
    g = grad.double() * (-arguments.clip_factor if arguments.maximize else arguments.clip_factor)
    if arguments.decoupled:
        weight = weight * (1 - arguments.lr * arguments.weight_decay)
    else:
        g = g + arguments.weight_decay * weight
    first = arguments.beta1 * first + (1 - arguments.beta1) * g
    second = arguments.beta2 * second + (1 - arguments.beta2) * g * g
    denominator = (second / (1 - arguments.beta2**7)).sqrt() + arguments.eps
    update = arguments.lr / (1 - arguments.beta1**7) * first / denominator

    step_fp32(kernels, state, grad, arguments)
    # fp32 rounds by 2**-24 relative; about 10 roundings enter a result, of terms no larger than the ones named here
    # (the differences of the lerp are of moments and gradients up to about 4).
    eps32 = 2.0**-24
    assert ((state.exp_avg - first).abs() <= 10 * eps32 * 4).all()
    assert ((state.exp_avg_sq - second).abs() <= 10 * eps32 * (second + 1e-12)).all()
    moment_error = arguments.lr / (1 - arguments.beta1**7) * 10 * eps32 * 4 / denominator
    bound = 10 * eps32 * (weight.abs() + update.abs()) + moment_error
    assert ((state.weight - (weight - update)).abs() <= bound).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_bits_depend_neither_on_threads_nor_on_the_instruction_set(
    kernels: HostKernels, instruction_set: str, threads: int
) -> None:
    if INSTRUCTION_SETS.index(instruction_set) > INSTRUCTION_SETS.index(kernels.instruction_set):
        pytest.skip(f"this machine has no {instruction_set}")
    count = 300001
    state, grads = initial_state(count), gradients(count, steps=3)
    other = HostKernels(threads, instruction_set)
    assert other.instruction_set == instruction_set
    for variant in ("clipped", "l2", "lerp_from_the_far_end"):
        arguments = VARIANTS[variant]
        assert_equal_states(run_split(other, state, grads, arguments), run_split(kernels, state, grads, arguments))
        assert_equal_states(run_fp32(other, state, grads, arguments), run_fp32(kernels, state, grads, arguments))
    sums = [grads[0].bfloat16(), grads[0].bfloat16()]
    for pool, total in zip((other, kernels), sums, strict=True):
        pool.accumulate(total, grads[1].bfloat16())
    assert torch.equal(*sums)
    other.close()


def test_a_step_of_the_whole_equals_steps_of_its_pieces(kernels: HostKernels) -> None:
    state, (grad,) = initial_state(300001), gradients(300001, steps=1)
    pieces = State(*(tensor.clone() for tensor in state))
    step_fp32(kernels, state, grad, PLAIN)
    for begin, end in itertools.pairwise((0, 3, 1001, 140000, 300001)):
        piece = State(*(tensor[begin:end] for tensor in pieces))
        step_fp32(kernels, piece, grad[begin:end], PLAIN)
    assert_equal_states(pieces, state)

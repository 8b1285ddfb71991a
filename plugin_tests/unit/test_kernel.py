"""The host kernels against torch, against a float64 reference, and against themselves.

Bit-equality with torch needs torch's AVX2 or AVX-512 kernels (its baseline has no FMA) and an IEEE square root in place
of MKL's; the docstring of kernel.py says why. ``exact_torch_sqrt`` provides the second.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatrain_accelerate.errors import ConfigError, KernelError
from megatrain_accelerate.optim import kernel
from megatrain_accelerate.optim.kernel import INSTRUCTION_SETS, AdamArguments, HostKernels, default_thread_count

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


@pytest.fixture
def exact_torch_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor.sqrt by numpy, correctly rounded: torch's comes from MKL and is off by an ulp for about 1% of floats."""
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda self: torch.from_numpy(np.sqrt(self.numpy())))


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


def run_fp32(kernels: HostKernels, state: State, grads: list[torch.Tensor], arguments: AdamArguments) -> State:
    result = State(*(tensor.clone() for tensor in state))
    for step, grad in enumerate(grads, 1):
        kernels.adamw_fp32(*result, grad, dataclasses.replace(arguments, step=step))
    return result


def run_split(kernels: HostKernels, state: State, grads: list[torch.Tensor], arguments: AdamArguments) -> State:
    result = State(*(tensor.clone() for tensor in state))
    hi = torch.empty(len(state.weight), dtype=torch.bfloat16)
    residual = torch.empty(len(state.weight), dtype=torch.int16)
    kernels.split(result.weight, hi, residual)
    for step, grad in enumerate(grads, 1):
        numbered = dataclasses.replace(arguments, step=step)
        kernels.adamw_split(hi, residual, result.exp_avg, result.exp_avg_sq, grad.bfloat16(), numbered)
    kernels.join(hi, residual, result.weight)
    return result


def assert_equal_states(actual: State, expected: State) -> None:
    for name, one, other in zip(State._fields, actual, expected, strict=True):
        assert torch.equal(one, other), name


def bit_patterns() -> torch.Tensor:
    """fp32 numbers: both halves' edge values in all pairs, and a million patterns of any kind."""
    edges = [
        0,
        1,
        2,
        0x7F,
        0x80,
        0x7FFE,
        0x7FFF,
        0x8000,
        0x8001,
        0xFF80,
        0xFFFE,
        0xFFFF,
        0x7F7F,
        0x7F80,
        0x3F80,
        0xFF7F,
    ]
    pairs = [(high << 16) | low for high, low in itertools.product(edges, edges)]
    random = np.random.default_rng(0).integers(0, 2**32, 1_000_001, dtype=np.uint32)
    return torch.from_numpy(np.concatenate([np.array(pairs, dtype=np.uint32), random]).view(np.float32))


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
    kernels: HostKernels,
) -> None:
    # MKL's sqrt is off by an ulp (2**-23 relative) for some arguments; the operations after it round what they get, so
    # an update (at most 10 lr here) may change by 2**-22 of itself. The sum with the weight is rounded to an ulp of the
    # weight. Both may happen in each of the steps.
    steps, count = 20, 65537
    state, grads = initial_state(count), gradients(count, steps)
    expected = run_torch(state, grads, PLAIN)
    actual = run_split(kernels, state, grads, PLAIN)
    assert torch.equal(actual.exp_avg, expected.exp_avg)
    assert torch.equal(actual.exp_avg_sq, expected.exp_avg_sq)
    bound = steps * (10 * PLAIN.lr * 2.0**-22 + torch.maximum(state.weight.abs(), expected.weight.abs()) * 2.0**-23)
    assert ((actual.weight - expected.weight).abs() <= bound).all()
    assert (actual.weight != expected.weight).float().mean() < 0.03


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

    kernels.adamw_fp32(*state, grad, arguments)
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
    kernels.adamw_fp32(*state, grad, PLAIN)
    for begin, end in itertools.pairwise((0, 3, 1001, 140000, 300001)):
        piece = State(*(tensor[begin:end] for tensor in pieces))
        kernels.adamw_fp32(*piece, grad[begin:end], PLAIN)
    assert_equal_states(pieces, state)


def test_join_reverses_split_for_every_kind_of_float(kernels: HostKernels) -> None:
    master = bit_patterns()
    hi = torch.empty(len(master), dtype=torch.bfloat16)
    residual = torch.empty(len(master), dtype=torch.int16)
    back = torch.empty_like(master)
    kernels.split(master, hi, residual)
    kernels.join(hi, residual, back)
    assert torch.equal(back.view(torch.int32), master.view(torch.int32))


def test_hi_is_the_bf16_rounding_of_the_master_except_at_ties(kernels: HostKernels) -> None:
    master = bit_patterns()
    master = master[~master.isnan()]
    hi = torch.empty(len(master), dtype=torch.bfloat16)
    kernels.split(master, hi, torch.empty(len(master), dtype=torch.int16))
    is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert is_tie.any()
    assert torch.equal(hi[~is_tie], master[~is_tie].bfloat16())
    assert (hi[is_tie].float().abs() > master[is_tie].abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulate_rounds_as_torch_add_does(kernels: HostKernels, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        # Every bf16 number with partners of its own and of other magnitudes, denormals and infinities included.
        dst = torch.cat([patterns] * 4)
        src = torch.cat([patterns.roll(shift) for shift in (1, 77, 1024, 30011)])
    else:
        dst, src = bit_patterns(), bit_patterns().flip(0)
    expected = dst + src
    kernels.accumulate(dst, src)
    assert torch.equal(dst.isnan(), expected.isnan())
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    finite = ~expected.isnan()
    assert torch.equal(dst[finite].view(bits), expected[finite].view(bits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 63, 9_000_001])
def test_zero_clears_the_tensor_and_nothing_else(kernels: HostKernels, dtype: torch.dtype, count: int) -> None:
    buffer = torch.ones(count + 2, dtype=dtype)
    kernels.zero(buffer[1:-1])
    assert buffer[1:-1].count_nonzero() == 0
    assert buffer[0] == 1
    assert buffer[-1] == 1


@pytest.mark.parametrize("count", LENGTHS)
def test_elements_next_to_the_arrays_are_not_written(kernels: HostKernels, count: int) -> None:
    dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32)
    guarded = [torch.full((count + 2,), 7, dtype=dtype) for dtype in dtypes]
    hi, residual, exp_avg, exp_avg_sq = (tensor[1:-1] for tensor in guarded)
    kernels.adamw_split(hi, residual, exp_avg, exp_avg_sq, torch.ones(count, dtype=torch.bfloat16), PLAIN)
    for tensor in guarded:
        assert tensor[0] == 7
        assert tensor[-1] == 7
    assert (exp_avg != 7).all()
    assert (exp_avg_sq != 7).all()


def test_calls_from_several_python_threads_do_not_mix(kernels: HostKernels) -> None:
    count, callers = 400_003, 6
    totals = [torch.zeros(count) for _ in range(callers)]

    def add(index: int) -> None:
        for _ in range(20):
            kernels.accumulate(totals[index], torch.full((count,), float(index + 1)))

    threads = [threading.Thread(target=add, args=(index,)) for index in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, total in enumerate(totals):
        assert (total == 20.0 * (index + 1)).all()


def test_workers_take_over_the_denormal_mode_of_the_caller(kernels: HostKernels) -> None:
    tiny = torch.full((3_000_001,), 1e-40)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor can't flush denormals")
        kernels.accumulate(tiny, tiny.clone())
    finally:
        torch.set_flush_denormal(False)
    assert tiny.view(torch.int32).count_nonzero() == 0
    tiny.fill_(1e-40)
    kernels.accumulate(tiny, tiny.clone())
    assert (tiny > 1e-40).all()


# Python 3.12 warns of any fork from a process with threads; that is just what is tested here.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_alone_and_leaves_the_parent_working() -> None:
    pool, total, ones = HostKernels(3), torch.zeros(400_003), torch.ones(400_003)
    pool.accumulate(total, ones)

    def add_again_and_close() -> None:
        # Only numpy and the pool: torch's own threads (OpenMP) don't survive a fork.
        pool.accumulate(total, ones)
        pool.close()
        sys.exit(0 if (total.numpy() == 2.0).all() else 3)

    child = multiprocessing.get_context("fork").Process(target=add_again_and_close)
    child.start()
    child.join(timeout=60)
    is_hanging = child.is_alive()
    child.kill()
    assert not is_hanging, "the child waits for threads that stayed with its parent"
    assert child.exitcode == 0
    assert (total == 1.0).all()
    pool.accumulate(total, ones)
    assert (total == 2.0).all()
    pool.close()


def test_many_pools_end_their_threads() -> None:
    def thread_count() -> int:
        return len(list(pathlib.Path("/proc/self/task").iterdir()))

    before = thread_count()
    pools = [HostKernels(4) for _ in range(5)]
    assert thread_count() == before + 15
    for pool in pools[:4]:
        pool.close()
        pool.close()
    assert thread_count() == before + 3
    del pools, pool
    assert thread_count() == before


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"weight": torch.zeros(8, dtype=torch.bfloat16)}, "weight must be torch.float32, got torch.bfloat16"),
        ({"grad": torch.zeros(9)}, "grad has 9 elements and weight has 8"),
        ({"exp_avg": torch.zeros(16)[::2]}, r"exp_avg must be contiguous, got shape \(8,\) with strides \(2,\)"),
        ({"exp_avg_sq": torch.zeros(8, device="meta")}, "exp_avg_sq must be in host memory, got a tensor on meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    kernels: HostKernels, replaced: dict[str, torch.Tensor], message: str
) -> None:
    tensors = {name: torch.zeros(8) for name in ("weight", "exp_avg", "exp_avg_sq", "grad")} | replaced
    with pytest.raises(KernelError, match=message):
        kernels.adamw_fp32(**tensors, arguments=PLAIN)


def test_accumulate_refuses_mixed_and_unknown_dtypes(kernels: HostKernels) -> None:
    with pytest.raises(KernelError, match=r"src must be torch\.bfloat16, got torch\.float32"):
        kernels.accumulate(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))
    with pytest.raises(KernelError, match=r"dst must be .*, got torch\.float64"):
        kernels.accumulate(torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64))


def test_closed_kernels_refuse_work() -> None:
    pool = HostKernels(2)
    pool.close()
    with pytest.raises(KernelError, match="closed"):
        pool.zero(torch.zeros(4))


def test_a_missing_or_foreign_library_is_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(kernel, "LIBRARY_PATH", tmp_path / "absent.so")
    with pytest.raises(KernelError, match=r"missing: no file .*absent\.so.*pip install"):
        HostKernels(1)
    foreign = tmp_path / "foreign.so"
    foreign.write_bytes(b"not a library")
    monkeypatch.setattr(kernel, "LIBRARY_PATH", foreign)
    with pytest.raises(KernelError, match=r"can't be loaded.*pip install"):
        HostKernels(1)


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_INTERFACE_VERSION", 999)
    with pytest.raises(KernelError, match="needs 999: they are from another build"):
        HostKernels(1)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"lr": float("nan")}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": -1e-8}, {"step": 0}]
)
def test_arguments_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        dataclasses.replace(PLAIN, **wrong)


def test_a_non_finite_clip_factor_never_reaches_the_masters() -> None:
    with pytest.raises(ConfigError, match="clip_factor must be finite"):
        dataclasses.replace(PLAIN, clip_factor=float("nan"))


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (4, 4), (5, 3), (16, 14)])
def test_default_leaves_two_cpus_where_there_are_more_than_four(
    monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int
) -> None:
    monkeypatch.setattr(kernel, "usable_cpu_count", lambda: cpus)
    assert default_thread_count() == threads


def test_thread_count_and_instruction_set_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least 1 thread, got 0"):
        HostKernels(0)
    with pytest.raises(KernelError, match="instruction_set must be one of baseline, avx2, avx512; got 'sse9'"):
        HostKernels(1, "sse9")

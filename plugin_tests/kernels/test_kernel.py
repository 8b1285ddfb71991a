"""The host kernels' loops, threads, checks and errors; the AdamW arithmetic is in numerics/test_kernel_numerics.py."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain_accelerate.errors import ConfigError, KernelError
from megatrain_accelerate.kernels import device
from megatrain_accelerate.kernels import host as kernel
from megatrain_accelerate.kernels.host import AdamArguments, HostKernels, default_thread_count
from megatrain_accelerate.kernels.moments import FloatMoments

# Every tail of a 16-wide vector, more than one chunk (131,072) with a tail, and nothing at all.
LENGTHS = (0, 1, 7, 15, 16, 17, 1000, 65537, 300001)
PLAIN = AdamArguments(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)


@pytest.fixture(scope="module")
def kernels() -> Iterator[HostKernels]:
    pool = HostKernels(3)
    yield pool
    pool.close()


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


def test_join_reverses_split_for_every_kind_of_float(kernels: HostKernels) -> None:
    master = bit_patterns()
    hi = torch.empty(len(master), dtype=torch.bfloat16)
    residual = torch.empty(len(master), dtype=torch.int16)
    back = torch.empty_like(master)
    kernels.split(master, hi, residual)
    kernels.join(hi, residual, back)
    assert torch.equal(back.view(torch.int32), master.view(torch.int32))


class LargestResult(TorchDispatchMode):
    """Notes the elements of the largest tensor that has memory of its own and that an operation in the body made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "copy_" not in str(func):
            self.elements = max(self.elements, result.numel())
        return result


def test_masters_on_the_device_are_split_and_joined_in_pieces_with_the_hosts_bits(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_PIECE_ELEMENTS", 1000)
    on_device = object.__new__(device.DeviceKernels)  # these two of its methods need no Triton
    master = bit_patterns()[:30_000].view(3, 100, 100)
    hi, residual = (torch.empty(master.shape, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    host_hi, host_residual, back = torch.empty_like(hi), torch.empty_like(residual), torch.empty_like(master)
    kernels.split(master, host_hi, host_residual)
    with LargestResult() as largest:
        on_device.split(master, hi, residual)
        on_device.join(hi, residual, back)
    assert largest.elements == 1000
    assert torch.equal(hi.view(torch.int16), host_hi.view(torch.int16))
    assert torch.equal(residual, host_residual)
    assert torch.equal(back.view(torch.int32), master.view(torch.int32))
    for shape in ((), (0,)):
        few = torch.ones(shape)
        on_device.split(few, hi.resize_(shape), residual.resize_(shape))
        on_device.join(hi, residual, few.fill_(2))
        assert torch.equal(few, torch.ones(shape))


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
    kernels.adamw(hi, residual, FloatMoments(exp_avg, exp_avg_sq), torch.ones(count, dtype=torch.bfloat16), PLAIN)
    for tensor in guarded:
        assert tensor[0] == 7
        assert tensor[-1] == 7
    assert (exp_avg != 7).all()
    assert (exp_avg_sq != 7).all()


def test_calls_from_several_python_threads_do_not_mix(kernels: HostKernels) -> None:
    # Long enough for a call to be interrupted by the scheduler halfway.
    count, callers, rounds = 4_000_003, 4, 15
    totals = [torch.zeros(count) for _ in range(callers)]
    steps = [torch.full((count,), float(index + 1)) for index in range(callers)]

    def add(index: int) -> None:
        for _ in range(rounds):
            kernels.accumulate(totals[index], steps[index])

    threads = [threading.Thread(target=add, args=(index,)) for index in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for total, step in zip(totals, steps, strict=True):
        assert torch.equal(total, step * rounds)


def test_workers_take_over_the_denormal_mode_of_the_caller(kernels: HostKernels) -> None:
    # Several rounds: in a single one the system may leave all chunks to one thread.
    denormal = torch.full((4_000_001,), 1e-40)
    for _ in range(10):
        flushed, kept = denormal.clone(), denormal.clone()
        try:
            if not torch.set_flush_denormal(True):
                pytest.skip("this processor can't flush denormals")
            kernels.accumulate(flushed, denormal)
        finally:
            torch.set_flush_denormal(False)
        kernels.accumulate(kept, denormal)
        assert flushed.view(torch.int32).count_nonzero() == 0
        assert (kept > 1e-40).all()


# Python 3.12 warns of any fork from a process with threads; that is just what is tested here.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_during_a_call_computes_alone_and_leaves_the_parent_working() -> None:
    count = 2_000_003
    pool, total, ones = HostKernels(3), torch.zeros(count), torch.ones(count)
    busy_total, is_over = torch.zeros(count), threading.Event()

    def keep_the_pool_busy() -> None:
        while not is_over.is_set():
            pool.accumulate(busy_total, ones)

    def add_and_close() -> None:
        # Only numpy and the pool: torch's own threads (OpenMP) don't survive a fork.
        pool.accumulate(total, ones)
        pool.close()
        sys.exit(0 if (total.numpy() == 1.0).all() else 3)

    busy_thread = threading.Thread(target=keep_the_pool_busy)
    busy_thread.start()
    try:
        for _ in range(5):
            child = multiprocessing.get_context("fork").Process(target=add_and_close)
            child.start()
            child.join(timeout=30)
            is_hanging = child.is_alive()
            child.kill()
            child.join()
            assert not is_hanging, "the child waits for threads that stayed with its parent"
            assert child.exitcode == 0
    finally:
        is_over.set()
        busy_thread.join()
    pool.accumulate(total, ones)
    assert (total == 1.0).all()
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
    moments = FloatMoments(tensors["exp_avg"], tensors["exp_avg_sq"])
    with pytest.raises(KernelError, match=message):
        kernels.adamw(tensors["weight"], None, moments, tensors["grad"], PLAIN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 17, 131072, 300001])
def test_square_sum_is_exact_to_double_precision_and_the_same_for_any_threads(dtype: torch.dtype, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    sums = []
    for threads in (1, 3):
        for instruction_set in kernel.INSTRUCTION_SETS:
            try:
                pool = HostKernels(threads, instruction_set)
            except KernelError:  # this machine can't run it
                continue
            sums.append(pool.square_sum(values))
            pool.close()
    assert len(set(sums)) == 1
    # Half an ulp of a double for each of the additions.
    assert sums[0] == pytest.approx(float(values.double().square().sum()), rel=count * 1.2e-16 + 1e-15, abs=0)


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
    kernel._library.cache_clear()
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

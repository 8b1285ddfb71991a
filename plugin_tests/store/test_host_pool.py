"""The pool of host memory: blocks never overlap, are reused, and the pool grows only when what is free is too small."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from engine_runs import used_bytes

from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.store.host_pool import GRANULE_BYTES, HostBlock, HostPool
from megatrain_accelerate.transfer.streams import Immediate

SEGMENT = 16 * GRANULE_BYTES


class Copy(Immediate):
    """The event of a copy that ends when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


@pytest.fixture
def kernels() -> Iterator[HostKernels]:
    kernels = HostKernels(1)
    yield kernels
    kernels.close()


def make_pool(kernels: HostKernels, **settings: float) -> HostPool:
    return HostPool(SEGMENT, kernels=kernels, register=False, **settings)


def fill(block: HostBlock, value: int) -> None:
    for part in block:
        part.fill_(value)


def holds(block: HostBlock, value: int) -> bool:
    return all(bool((part == value).all()) for part in block)


def test_blocks_hold_exactly_what_was_asked_for_and_never_overlap(kernels: HostKernels) -> None:
    pool, generator = make_pool(kernels), random.Random(0)
    taken: list[tuple[HostBlock, int]] = []
    for value in range(200):
        size = generator.randrange(1, 3 * SEGMENT)
        block = pool.take(size)
        assert sum(part.numel() for part in block) == size
        fill(block, value)
        taken.append((block, value))
        if len(taken) > 5:
            old, expected = taken.pop(generator.randrange(len(taken)))
            assert holds(old, expected)
            pool.give_back(old, Immediate())
    assert all(holds(block, value) for block, value in taken)


def test_the_pool_holds_what_was_in_use_at_once_whatever_the_sizes(kernels: HostKernels) -> None:
    pool, generator = make_pool(kernels), random.Random(1)
    total = 8 * SEGMENT
    for _ in range(50):  # batches of other lengths, the same bytes in all
        sizes, left = [], total
        while left:
            sizes.append(min(left, GRANULE_BYTES * generator.randrange(1, 40)))
            left -= sizes[-1]
        blocks = [pool.take(size) for size in sizes]
        generator.shuffle(blocks)
        for block in blocks:
            pool.give_back(block, Immediate())
    assert pool.size_bytes == total
    assert used_bytes(pool) == 0


def test_a_block_that_a_copy_still_uses_is_not_handed_out(kernels: HostKernels) -> None:
    pool = make_pool(kernels)
    first, second = pool.take(SEGMENT // 2), pool.take(SEGMENT // 2)
    fill(first, 1)
    copy = Copy()
    pool.give_back(first, copy)
    pool.give_back(second, Immediate())
    fill(pool.take(SEGMENT // 2), 2)
    assert holds(first, 1)
    assert not copy.is_over


def test_the_pool_waits_for_a_copy_before_it_grows(kernels: HostKernels) -> None:
    pool = make_pool(kernels)
    copy = Copy()
    pool.give_back(pool.take(SEGMENT), copy)
    assert used_bytes(pool) == SEGMENT
    pool.take(SEGMENT)
    assert copy.is_over
    assert pool.size_bytes == SEGMENT


def test_growth_beyond_the_host_memory_is_refused_with_the_numbers(kernels: HostKernels) -> None:
    pool = make_pool(kernels, host_memory_gib=0.001)
    with pytest.raises(
        HostMemoryError,
        match=r"need 1\.00 MiB more, but only 0 B are free; lower megatrain_config\.placement\.offloaded_layers",
    ):
        pool.take(1)
    assert pool.size_bytes == 0


def test_a_block_given_back_after_closing_is_ignored(kernels: HostKernels) -> None:
    pool = make_pool(kernels)
    block = pool.take(10)
    pool.close()
    pool.give_back(block, Immediate())
    assert pool.size_bytes == used_bytes(pool) == 0
    assert torch.equal(block[0], torch.zeros(10, dtype=torch.uint8))

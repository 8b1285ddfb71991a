"""Which values of a graph are reckoned to be in memory, and for how long, by Inductor's rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from megatrain_accelerate.estimate.fused_kernels import FusedKernels
from megatrain_accelerate.estimate.layer_graph import GraphCosts, LayerGraph, extended

ROWS = 512
LONG, SHORT = 1025, 1024
"""A row that is reduced in a loop, and one that is reduced in one block."""


def kernels_of(function: Callable[..., object], *inputs: torch.Tensor) -> FusedKernels:
    return FusedKernels(make_fx(function, tracing_mode="fake")(*inputs).graph)


def rows(length: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(ROWS, length, dtype=dtype)


def scaled_difference(*inputs: torch.Tensor) -> torch.Tensor:
    """As a softmax's backward: a product in fp32 of all inputs, less its sum."""
    product = inputs[0].float()
    for other in inputs[1:]:
        product = product * other
    return (product - product.sum(-1, keepdim=True)).bfloat16()


@pytest.mark.parametrize(
    ("length", "inputs", "is_kept"),
    [(LONG, 5, True), (SHORT, 5, False), (LONG, 4, False)],
    ids=["a-dear-one", "a-row-in-one-block", "a-cheap-one"],
)
def test_what_a_loop_sums_and_reads_again_is_in_memory_if_it_is_dear(length: int, inputs: int, is_kept: bool) -> None:
    given = [rows(length) for _ in range(inputs)]
    kernels = kernels_of(scaled_difference, *given)
    result_bytes, product_bytes = given[0].nbytes, 2 * given[0].nbytes
    assert max(kernels.alive_bytes(set())) == result_bytes + is_kept * product_bytes
    assert kernels.traffic_bytes() == (inputs + 1) * result_bytes + is_kept * 2 * product_bytes


@pytest.mark.parametrize("number", [False, True])
def test_the_target_of_a_scatter_is_in_memory_and_read_by_a_later_kernel(number: bool) -> None:
    def function(given: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(ROWS, SHORT, dtype=given.dtype)
        written: torch.Tensor | float = 1.0 if number else 2 * given.sum(-1, keepdim=True)
        return 3 * zeros.scatter(-1, index, written)  # type: ignore[arg-type]

    given, index = rows(SHORT), torch.empty(ROWS, 1, dtype=torch.int64)
    kernels = kernels_of(function, given, index)
    # The result lies where the target did, which nothing reads any more.
    assert max(kernels.alive_bytes(set())) == given.nbytes
    of_sums = 0 if number else 2 * ROWS
    assert kernels.traffic_bytes() == 3 * given.nbytes + (not number) * given.nbytes + index.nbytes + of_sums


def test_what_is_read_before_and_after_a_scatter_is_in_memory_if_it_is_dear() -> None:
    def function(index: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        total = inputs[0]
        for other in inputs[1:]:
            total = total + other
        return total + torch.zeros(ROWS, SHORT, dtype=total.dtype).scatter(-1, index, total.sum(-1, keepdim=True))

    index = torch.empty(ROWS, 1, dtype=torch.int64)
    cheap, dear = (kernels_of(function, index, *(rows(SHORT) for _ in range(inputs))) for inputs in (4, 5))
    one = rows(SHORT).nbytes
    assert max(cheap.alive_bytes(set())) == one
    assert max(dear.alive_bytes(set())) == 2 * one
    # Four inputs are read by both kernels; of five the sum is written by one and read by both.
    assert cheap.traffic_bytes() - dear.traffic_bytes() == (2 * 4 - (5 + 3)) * one


def test_a_kernel_holds_what_it_reads_until_all_of_it_is_written() -> None:
    def function(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = left @ right
        halves = product[:, :LONG] + 1.0
        return halves, halves.float()

    left, right = torch.empty(ROWS, 64, dtype=torch.bfloat16), torch.empty(64, 2 * LONG, dtype=torch.bfloat16)
    half = rows(LONG).nbytes
    assert max(kernels_of(function, left, right).alive_bytes(set())) == 2 * half + half + 2 * half


def test_a_result_takes_the_place_of_what_is_read_last() -> None:
    def function(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left @ right).sin() * 2.0

    left, right = torch.empty(ROWS, 64, dtype=torch.bfloat16), torch.empty(64, LONG, dtype=torch.bfloat16)
    assert max(kernels_of(function, left, right).alive_bytes(set())) == rows(LONG).nbytes


def graph(*alive_bytes: int) -> LayerGraph:
    run = GraphCosts((), 0.0, 0.0, alive_bytes)
    return LayerGraph(run, run, run, 0, 0)


def test_the_peak_of_many_sequences_is_where_they_need_the_most() -> None:
    # The gradients of weights are as large for one sequence as for many; scores grow.
    found = extended(graph(10, 2), graph(10, 4), 8)
    assert found.backward.alive_bytes == (10, 16)
    assert found.backward.peak_bytes == 16


def test_of_graphs_that_were_cut_otherwise_the_peaks_are_on_a_line() -> None:
    found = extended(graph(3, 10), graph(12), 8)
    assert found.backward.peak_bytes == 24

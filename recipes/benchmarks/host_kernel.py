"""Speed of the fused host AdamW against the memory's own speed and against torch's fused CPU AdamW.

    python recipes/benchmarks/host_kernel.py --parameters 200000000 --threads 1 2 --json host_kernel.json

For each number of threads it prints:

- ``adamw_split``: the step on split masters (26 bytes of memory traffic a parameter);
- ``plain sum``: one fp32 array added to another (12 bytes): the bound that the memory sets;
- ``adamw_split_bf16``: the step on split masters with bf16 moments (18 bytes);
- ``adamw_split_int8``: the same with 8-bit moments (14.1 bytes);
- ``adamw_fp32``: the step on plain fp32 weights and gradients (28 bytes);
- ``torch fused``: ``torch.optim.AdamW(fused=True)`` on the same fp32 tensors (28 bytes, no bf16 weights written).

G parameters/s is the figure to size a run with; "of sum" is the loop's GB/s over the plain sum's. Memory is huge-page
backed (``mmap`` with ``MADV_HUGEPAGE``), as the host store's is. Rounds of the two loops on the same arrays alternate
and the best round counts, so that a neighbour on the machine disturbs both alike. 1 GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import time
from collections.abc import Callable

import torch

from megatrain_accelerate.kernels.host import AdamArguments, HostKernels
from megatrain_accelerate.kernels.moments import FloatMoments, Int8Moments, block_count
from megatrain_accelerate.units import GB

BYTES = {
    "adamw_split": 26.0,
    "plain sum": 12.0,
    "adamw_split_bf16": 18.0,
    "adamw_split_int8": 14.125,
    "adamw_fp32": 28.0,
    "torch fused": 28.0,
}
"""Memory traffic of a loop for each parameter."""
ARGUMENTS = AdamArguments(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=100)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured loop."""

    name: str
    threads: int
    seconds: float
    giga_parameters_per_s: float
    gigabytes_per_s: float
    of_sum: float


def huge_page_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor in an anonymous mapping that asks for huge pages; the mapping lives as long as the tensor."""
    mapping = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype, count=count)


def best_seconds(loops: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The shortest time of each loop over alternating rounds, after one round that doesn't count."""
    best = dict.fromkeys(loops, float("inf"))
    for index in range(rounds + 1):
        for name, loop in loops.items():
            begin = time.perf_counter()
            loop()
            if index > 0:
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def states(kernels: HostKernels, count: int, *dtypes: torch.dtype) -> list[torch.Tensor]:
    """Flat tensors of zeros, first touched by the threads that will work on them."""
    tensors = [huge_page_tensor(count, dtype) for dtype in dtypes]
    for tensor in tensors:
        kernels.zero(tensor)
    return tensors


def split_seconds(kernels: HostKernels, parameters: int, rounds: int) -> dict[str, float]:
    """The step on split masters and the plain sum, on the same arrays."""
    half, single = torch.bfloat16, torch.float32
    hi, residual, exp_avg, exp_avg_sq, grad = states(kernels, parameters, half, torch.int16, single, single, half)
    grad.fill_(1e-3)
    moments = FloatMoments(exp_avg, exp_avg_sq)
    return best_seconds(
        {
            "adamw_split": lambda: kernels.adamw(hi, residual, moments, grad, ARGUMENTS),
            "plain sum": lambda: kernels.accumulate(exp_avg, exp_avg_sq),
        },
        rounds,
    )


def bf16_seconds(kernels: HostKernels, parameters: int, rounds: int) -> dict[str, float]:
    """The step on split masters with bf16 moments."""
    half = torch.bfloat16
    hi, residual, exp_avg, exp_avg_sq, grad = states(kernels, parameters, half, torch.int16, half, half, half)
    grad.fill_(1e-3)
    moments = FloatMoments(exp_avg, exp_avg_sq)
    step = {"adamw_split_bf16": lambda: kernels.adamw(hi, residual, moments, grad, ARGUMENTS)}
    return best_seconds(step, rounds)


def int8_seconds(kernels: HostKernels, parameters: int, rounds: int) -> dict[str, float]:
    """The step on split masters with 8-bit moments."""
    half, single, blocks = torch.bfloat16, torch.float32, block_count(parameters)
    dtypes = (half, torch.int16, torch.int8, torch.uint8, half)
    hi, residual, exp_avg, exp_avg_sq, grad = states(kernels, parameters, *dtypes)
    moments = Int8Moments(exp_avg, exp_avg_sq, *states(kernels, blocks, single, single))
    grad.fill_(1e-3)
    return best_seconds(
        {"adamw_split_int8": lambda: kernels.adamw(hi, residual, moments, grad, ARGUMENTS)},
        rounds,
    )


def fp32_seconds(kernels: HostKernels, parameters: int, rounds: int) -> dict[str, float]:
    """The step on fp32 weights and torch's fused one, on the same arrays."""
    weight, exp_avg, exp_avg_sq, grad = states(kernels, parameters, *[torch.float32] * 4)
    grad.fill_(1e-3)
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=ARGUMENTS.lr, weight_decay=ARGUMENTS.weight_decay, fused=True)
    # The states that torch would make itself lie in small pages; the comparison is of the loops.
    optimizer.state[parameter] = {"step": torch.tensor(100.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return best_seconds(
        {
            "adamw_fp32": lambda: kernels.adamw(weight, None, FloatMoments(exp_avg, exp_avg_sq), grad, ARGUMENTS),
            "torch fused": lambda: optimizer.step(),
        },
        rounds,
    )


def measure(parameters: int, threads: int, rounds: int) -> list[Row]:
    """The rows for one number of threads."""
    torch.set_num_threads(threads)
    kernels = HostKernels(threads)
    seconds = split_seconds(kernels, parameters, rounds) | bf16_seconds(kernels, parameters, rounds)
    seconds |= int8_seconds(kernels, parameters, rounds) | fp32_seconds(kernels, parameters, rounds)
    kernels.close()

    sum_rate = parameters * BYTES["plain sum"] / seconds["plain sum"]
    rows = []
    for name, elapsed in seconds.items():
        rate = parameters * BYTES[name] / elapsed
        rows.append(Row(name, threads, elapsed, parameters / elapsed / 1e9, rate / GB, rate / sum_rate))
    return rows


def main() -> None:
    """Reads the arguments, measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000, help="elements of each array")
    parser.add_argument("--threads", type=int, nargs="+", default=[HostKernels().threads], help="thread counts to try")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each loop")
    parser.add_argument("--json", metavar="FILE", help="write the rows, and what they were measured with, to FILE")
    options = parser.parse_args()
    if options.parameters < 1 or options.rounds < 1 or min(options.threads) < 1:
        parser.error("--parameters, --rounds and --threads must be at least 1")

    instruction_set = HostKernels(1).instruction_set
    print(f"{options.parameters:,} parameters, {instruction_set} kernels, torch {torch.__version__}")
    print(f"{'loop':<18}{'threads':>8}{'ms':>10}{'G params/s':>12}{'GB/s':>8}{'of sum':>10}")
    rows: list[Row] = []
    for threads in options.threads:
        for row in measure(options.parameters, threads, options.rounds):
            print(
                f"{row.name:<18}{row.threads:>8}{row.seconds * 1e3:>10.1f}{row.giga_parameters_per_s:>12.3f}"
                f"{row.gigabytes_per_s:>8.1f}{row.of_sum:>10.0%}",
                flush=True,
            )
            rows.append(row)
    if options.json:
        document = {
            "parameters": options.parameters,
            "rounds": options.rounds,
            "instruction_set": instruction_set,
            "torch": torch.__version__,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        with open(options.json, "w") as file:
            json.dump(document, file, indent=2)


if __name__ == "__main__":
    main()

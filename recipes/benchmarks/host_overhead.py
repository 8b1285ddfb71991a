"""Host time that the engine adds to a model: a training step and a forward without gradients, beside plain PyTorch's.

    OMP_NUM_THREADS=1 python recipes/benchmarks/host_overhead.py --json host_overhead.json

The model is a Llama whose layers are too small for their arithmetic to count, so that what remains is Python and the launch
of kernels: 48 layers, hidden size 16, one batch of 8 tokens, fp32, ``torch.optim.AdamW``, one thread, on the CPU. All layers
are kept, and their weights are streamed; without gradients they are streamed or held, as a GPU holds them by default. Every
figure is the median of ``--steps`` steps; rounds of all systems alternate, and the best of ``--rounds`` counts, so that a
neighbour on the machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain_accelerate


def make_model() -> nn.Module:
    """The Llama of the module's description, in training mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=48,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).train()


def prepared(model: nn.Module, evaluation_weights: str | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its AdamW after ``accelerator.prepare``: plain, or by the plugin with this setting."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if evaluation_weights is not None:
        megatrain_accelerate.enable(placement={"kept_layers": 48, "device_layers": 0}, evaluation_weights=evaluation_weights)
    else:
        megatrain_accelerate.disable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    return model, optimizer


def median_ms(work: Callable[[], None], steps: int) -> float:
    """Median wall time of a call in milliseconds."""
    for _ in range(3):
        work()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> Callable[[], None]:
    """A training step."""

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_of(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """A forward without gradients."""

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids, labels=ids, use_cache=False)

    return forward


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the best counts")
    parser.add_argument("--json", help="file to write the figures to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.arange(8).reshape(1, 8)
    model = make_model()
    models = {
        "streamed": prepared(copy.deepcopy(model), "stream"),
        "held": prepared(copy.deepcopy(model), "resident"),
        "plain": prepared(model),
    }
    found: dict[str, dict[str, float]] = {"training step": {}, "forward without gradients": {}}
    for _ in range(arguments.rounds):
        for name, (model, optimizer) in models.items():
            works = {"forward without gradients": forward_of(model, ids)}
            if name != "held":  # only between forwards without gradients
                works["training step"] = step_of(model, optimizer, ids)
            for what, work in works.items():
                found[what][name] = min(found[what].get(name, float("inf")), median_ms(work, arguments.steps))
    for what, times in found.items():
        ratios = {name: took / times["plain"] for name, took in times.items() if name != "plain"}
        told = (f"{name} {times[name]:.2f} ms, {ratio:.2f} times" for name, ratio in ratios.items())
        print(f"{what}: plain {times['plain']:.2f} ms, {'; '.join(told)}")
        times |= {f"{name}_ratio": ratio for name, ratio in ratios.items()}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()

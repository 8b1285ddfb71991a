"""How much Python the engine adds to a layer: what a small model's step, and a generated token, cost most of all.

Calls of Python functions are counted, not timed: they are the same in every run. What a model pays once for all of its layers
cancels between two models of different depth, and so does the model's own Python between a streamed and a plain one.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import attach
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

IDS = torch.arange(8).reshape(1, 8)

Work = Callable[[], None]


def make_model(layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).train()


def forward_of(model: nn.Module) -> Work:
    def forward() -> None:
        with torch.no_grad():
            model(input_ids=IDS, use_cache=False)

    return forward


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Work:
    def step() -> None:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def count_calls(work: Work) -> int:
    """Calls of Python functions, of this thread, that ``work`` takes when it is done again."""
    for _ in range(3):
        work()
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()  # what it finds calls functions of Python
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_of_forward(layers: int, is_streamed: bool, **settings: Any) -> int:
    model = make_model(layers)
    engine = attach(model, bf16=False, **settings) if is_streamed else None
    calls = count_calls(forward_of(model))
    if engine is not None:
        engine.close()
    return calls


def calls_of_step(layers: int, is_streamed: bool, **settings: Any) -> int:
    model = make_model(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    if not is_streamed:
        return count_calls(step_of(model, optimizer))
    engine = attach(model, bf16=False, kept_layers=layers, **settings)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    step = step_of(model, optimizer)

    def step_with_all_applied() -> None:
        engine.runtime.worker.drain()  # how many layers wait for their step is a matter of time
        step()

    calls = count_calls(step_with_all_applied)
    engine.close()
    return calls


def added_a_layer(calls: Callable[..., int], **settings: Any) -> float:
    """Calls of Python functions that the engine adds to each layer."""
    fewer, more = 3, 9
    streamed = calls(more, True, **settings) - calls(fewer, True, **settings)
    return (streamed - (calls(more, False) - calls(fewer, False))) / (more - fewer)


@pytest.mark.parametrize(("evaluation_weights", "bound"), [("stream", 62), ("resident", 16)])
def test_a_forward_without_gradients_adds_few_python_calls_a_layer(evaluation_weights: str, bound: int) -> None:
    assert added_a_layer(calls_of_forward, evaluation_weights=evaluation_weights) <= bound


@pytest.mark.parametrize(("device_layers", "bound"), [(0, 490), (-1, 330)], ids=["streamed", "fitting"])
def test_a_training_step_adds_few_python_calls_a_layer(device_layers: int, bound: int) -> None:
    assert added_a_layer(calls_of_step, device_layers=device_layers) <= bound

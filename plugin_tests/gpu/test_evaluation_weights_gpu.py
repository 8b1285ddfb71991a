"""Weights held between forwards without gradients, on a GPU: the same tokens, one fetch, memory that comes back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_runs import Training, assert_equal_states, attach
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.units import MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = 40
LAYERS = 8
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 2048, "num_attention_heads": 8}


@pytest.fixture
def trainings() -> Iterator[Any]:
    made: list[Training] = []

    def make(**settings: object) -> Training:
        model = tiny_model(num_hidden_layers=LAYERS, num_key_value_heads=4, **SHAPE)
        engine = attach(model, device="cuda", compile_layers=False, kept_layers=2, micro_batch_size=4, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        made.append(Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred")))
        return made[-1]

    yield make
    for run in made:
        run.engine.close()


def generate(run: Training, tokens: int = TOKENS) -> torch.Tensor:
    prompt = token_batches(1, batch=4, length=64, vocabulary=2048)[0].cuda()
    run.model.eval()
    run.model.generation_config.pad_token_id = 0
    text = run.model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    run.model.train()
    return text


def step(run: Training, seed: int) -> float:
    return run.step(token_batches(1, batch=4, length=256, vocabulary=2048, seed=seed)[0].cuda(), max_norm=1.0)


def h2d_bytes(run: Training) -> int:
    return run.engine.runtime.meter.counters.h2d_bytes


@pytest.mark.parametrize("setting", ["auto", "resident"])
def test_generated_tokens_are_the_same_and_each_layer_is_fetched_once(trainings: Any, setting: str) -> None:
    streamed, held = trainings(evaluation_weights="stream"), trainings(evaluation_weights=setting)
    weights = sum(layer.unit.layout.weight_bytes for layer in held.engine.runtime.layers)
    texts, counted, seconds = [], [], []
    for run in (streamed, held):
        before, start = h2d_bytes(run), time.perf_counter()
        texts.append(generate(run))
        torch.cuda.synchronize()
        counted.append(h2d_bytes(run) - before)
        seconds.append(time.perf_counter() - start)
    assert torch.equal(*texts)
    assert counted[0] > 0.9 * TOKENS * weights
    assert counted[1] <= (1 if setting == "resident" else 2) * weights + 3 * weights // LAYERS
    print(f"{setting}: {seconds[0] / TOKENS * 1e3:.2f} ms a token streamed, {seconds[1] / TOKENS * 1e3:.2f} ms held")


def test_training_between_generations_has_the_same_bits_and_the_memory_back(trainings: Any) -> None:
    states, losses = [], []
    for setting in ("stream", "resident"):
        run = trainings(evaluation_weights=setting)
        found = [step(run, 0), step(run, 1)]
        run.engine.drain()
        allocated = torch.cuda.memory_allocated()
        weights = sum(layer.unit.layout.weight_bytes for layer in run.engine.runtime.layers)
        for seed in (2, 3, 4):
            generate(run, 8)
            more = torch.cuda.memory_allocated() - allocated
            assert (more > 0.9 * weights) == (setting == "resident")
            found.append(step(run, seed))
            run.engine.drain()
            assert torch.cuda.memory_allocated() - allocated < 8 * MIB
        losses.append(found)
        states.append({name: value.cpu() for name, value in run.state().items()})
        run.engine.close()
    assert losses[0] == losses[1]
    assert_equal_states(states[1], states[0])


def test_an_evaluation_right_after_a_step_waits_for_the_copies_of_its_layers(trainings: Any) -> None:
    # Copies of all layers are issued at once into memory that kernels have just let go of.
    results = []
    for setting in ("stream", "resident"):
        run = trainings(evaluation_weights=setting)
        ids = token_batches(1, batch=4, length=256, vocabulary=2048)[0].cuda()
        logits = []
        for seed in range(6):
            step(run, seed)
            with torch.no_grad():
                logits.append(run.model(input_ids=ids).logits.cpu())
        results.append(logits)
        run.engine.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def all_but(left_bytes: int) -> torch.Tensor:
    """Takes the GPU's free memory, of which other processes may take some meanwhile."""
    for _ in range(100):
        with contextlib.suppress(torch.OutOfMemoryError):
            return torch.empty(torch.cuda.mem_get_info()[0] - left_bytes, dtype=torch.uint8, device="cuda")
    raise AssertionError("other processes' memory changes all the time")


def test_an_evaluation_that_fills_the_gpu_makes_held_layers_leave_whatever_is_free_in_pieces(trainings: Any) -> None:
    run = trainings(evaluation_weights="auto")
    generate(run)
    prefetcher = run.engine.runtime.prefetcher
    assert len(prefetcher.own_slots) == LAYERS
    ids = token_batches(1, batch=4, length=256, vocabulary=2048)[0].cuda()
    with torch.no_grad():
        reference = run.model(input_ids=ids).logits
        # Half of 320 MiB is free, but in pieces of 5 MiB.
        blocks = [torch.empty(5 * MIB, dtype=torch.uint8, device="cuda") for _ in range(64)]
        del blocks[::2]
        torch.cuda.empty_cache()
        for _ in range(20):  # other processes may give memory back meanwhile
            taken = all_but(16 * MIB)
            try:
                squeezed = run.model(input_ids=ids).logits
            finally:
                del taken
                torch.cuda.empty_cache()
            if len(prefetcher.own_slots) < LAYERS:
                break
        del blocks
        torch.cuda.empty_cache()
    assert len(prefetcher.own_slots) < LAYERS
    assert torch.equal(squeezed, reference)

"""Runs without data run few tiles of a loop, find what all of them would cost, and take no longer for longer sequences."""

from __future__ import annotations

import contextlib

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.layers import token_tiles
from megatrain_accelerate.layers.token_tiles import few_tiles, tiles, times
from megatrain_accelerate.loss import products, tiled_cross_entropy
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.plan.step_memory import LiveBytes
from megatrain_accelerate.plan.step_profile import StepProfile

VOCABULARY = 512


@pytest.mark.parametrize("count", range(9))
def test_every_tile_counts_once_whether_it_runs_or_not(count: int) -> None:
    assert [(tile, times()) for tile in tiles(range(count))] == [(tile, 1) for tile in range(count)]
    with few_tiles():
        run = [(tile, times()) for tile in tiles(range(count))]
        both = sum(times() for _ in tiles(range(count)) for _ in tiles(range(5)))
    assert sum(counted for _, counted in run) == count
    assert len(run) == min(count, 3)
    assert [tile for tile, counted in run if counted == 1][-1:] == [count - 1][:count]
    assert both == 5 * count
    assert times() == 1


def test_a_loop_that_fails_does_not_count_on() -> None:
    with contextlib.suppress(RuntimeError), few_tiles():
        loop = tiles(range(9))
        next(loop)
        next(loop)
        assert times() == 7
        raise RuntimeError
    assert times() == 1


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_cross_entropy, "TILE_BYTES", 0)
    monkeypatch.setattr(tiled_cross_entropy, "MIN_TILE_TOKENS", 64)
    monkeypatch.setattr(tiled_cross_entropy, "STRIP_BYTES", 4 * VOCABULARY * 8)
    monkeypatch.setattr(products, "PART_BYTES", 4 * 64 * 32)


def profiled(length: int) -> StepProfile:
    model = tiny_model(vocab_size=VOCABULARY, max_position_embeddings=4096).train()
    engine = attach(model, token_tile=64)
    ids = token_batches(1, batch=2, length=length, vocabulary=VOCABULARY)[0]
    step_profile = profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    engine.close()
    return step_profile


@pytest.mark.parametrize("length", [pytest.param(256, marks=pytest.mark.long), 274])
@pytest.mark.usefixtures("small_tiles")
def test_few_tiles_cost_what_all_of_them_do(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    few = profiled(length)
    monkeypatch.setattr(token_tiles, "few_tiles", contextlib.nullcontext)
    every = profiled(length)
    assert few == every
    assert max(profile.forward.flops for profile in few.profiles.values()) > 0


@pytest.mark.usefixtures("small_tiles")
def test_a_longer_sequence_takes_no_more_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    count = LiveBytes.track

    def counted(live: LiveBytes, storage: torch.UntypedStorage) -> bool:
        counts[-1] += 1
        return count(live, storage)

    monkeypatch.setattr(LiveBytes, "track", counted)
    for length in (512, 2048):
        counts.append(0)
        profiled(length)
    assert counts[0] == counts[1] > 0

"""The step profiles that tests share are those that each would have made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import attach
from profile_cache import Profiles, remembering
from torch import nn
from trainer_runs import examples, tiny_llama

from megatrain_accelerate.plan.fake_step import profile_step

CPU = torch.device("cpu")


def batch(length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.stack([row["input_ids"] for row in examples(2, length=length)])
    return {"input_ids": ids, "labels": ids}


def frozen() -> nn.Module:
    model = tiny_llama()
    model.model.layers[0].requires_grad_(False)
    return model


def with_another_loss() -> nn.Module:
    model = tiny_llama()

    def halved(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return 0.5 * nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model.loss_function = halved
    return model


def test_an_equal_step_has_the_profile_of_the_first() -> None:
    step_profile = remembering(profile_step, {})
    models = [tiny_llama() for _ in range(3)]
    runtimes = [attach(model).runtime for model in models]
    first, second = (
        step_profile(model, runtime, batch(), CPU) for model, runtime in zip(models[:2], runtimes[:2], strict=True)
    )
    assert first is second
    assert first == profile_step(models[2], runtimes[2], batch(), CPU)


@pytest.mark.parametrize("make", [frozen, with_another_loss, lambda: tiny_llama(attention_dropout=0.1)])
def test_another_model_has_an_profile_of_its_own(make: Callable[[], nn.Module]) -> None:
    made: Profiles = {}
    for build in (tiny_llama, make):
        model = build()
        remembering(profile_step, made)(model, attach(model).runtime, batch(), CPU)
    assert len(made) == 2


def test_other_tokens_have_the_same_profile() -> None:
    models = [tiny_llama() for _ in range(2)]
    runtimes = [attach(model).runtime for model in models]
    step_profile = remembering(profile_step, {})
    other = {name: ids.flip(1) for name, ids in batch().items()}
    assert not torch.equal(other["input_ids"], batch()["input_ids"])
    first = step_profile(models[0], runtimes[0], batch(), CPU)
    assert step_profile(models[0], runtimes[0], other, CPU) is first
    assert profile_step(models[1], runtimes[1], other, CPU) == first


def test_another_batch_and_another_way_have_profiles_of_their_own() -> None:
    made: Profiles = {}
    model = tiny_llama()
    runtime = attach(model).runtime
    step_profile = remembering(profile_step, made)
    step_profile(model, runtime, batch(), CPU)
    step_profile(model, runtime, batch(8), CPU)
    step_profile(model, runtime, {**batch(), "labels": batch()["labels"].masked_fill(batch()["labels"] < 9, -100)}, CPU)
    runtime.batch_cut.chosen = 1
    step_profile(model, runtime, batch(), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step_profile(model, runtime, batch(), CPU)
    assert len(made) == 5

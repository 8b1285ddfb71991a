"""A run without data makes the attention masks that a run with data makes, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from versions import older

from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.plan.step_memory import fake_model

BATCH, LENGTH = 2, 48

pytestmark = pytest.mark.skipif(older("transformers", "5.0"), reason="older ones mask packed positions always, or never")


def tiny_gemma(**changes: object) -> nn.Module:
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        **changes,
    )
    return Gemma3ForCausalLM(config)


def packed_positions() -> torch.Tensor:
    return torch.cat([torch.arange(16), torch.arange(LENGTH - 16)]).expand(BATCH, -1).contiguous()


def padded() -> torch.Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, 40:] = 0
    return mask


INPUTS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "tokens alone": dict,
    "a full mask": lambda: {"attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64)},
    "padding": lambda: {"attention_mask": padded()},
    "positions": lambda: {"position_ids": torch.arange(LENGTH).expand(BATCH, -1).contiguous()},
    "a full mask and packed positions": lambda: {
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64),
        "position_ids": packed_positions(),
    },
    "packed positions": lambda: {"position_ids": packed_positions()},
}


def masks_of(model: nn.Module, inputs: dict[str, torch.Tensor], engine: Any, fake: bool) -> list[tuple[int, ...] | None]:
    """The shape of each layer's mask, in call order."""
    found: list[tuple[int, ...] | None] = []

    def look(layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        found.append(None if mask is None else tuple(mask.shape))
        return args[0]

    with engine.runtime.layers_run_by(look):
        if fake:
            with fake_model(model, inputs, engine.device) as (fake_inputs, live), live:
                model.forward(**fake_inputs)
        else:
            model.forward(**inputs)
    return found


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("make", [tiny_model, tiny_gemma], ids=["causal", "sliding windows"])
def test_a_fake_run_makes_the_masks_of_a_real_one(make: Callable[..., nn.Module], use_cache: bool, given: str) -> None:
    model = make(use_cache=use_cache).train()
    engine = attach(model)
    ids = token_batches(1, batch=BATCH, length=LENGTH)[0]
    inputs = {"input_ids": ids, "labels": ids, **INPUTS[given]()}
    # As in training, where the engine decides against a cache.
    real = masks_of(model, {**inputs, "use_cache": False}, engine, fake=False)
    assert masks_of(model, inputs, engine, fake=True) == real
    assert len(real) == model.config.num_hidden_layers
    engine.close()


def test_the_profile_of_a_long_sequence_has_no_mask_of_all_tokens_by_all() -> None:
    model = tiny_model(use_cache=False, max_position_embeddings=1 << 17).train()
    engine = attach(model)
    ids = token_batches(1, batch=1, length=1 << 17)[0]
    step_profile = profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    # A mask would have 16 GiB; logits and what the loss makes of them are what else is large, and come after the layers.
    assert max(event.live_bytes for event in step_profile.forward_calls) < 1 << 30
    engine.close()

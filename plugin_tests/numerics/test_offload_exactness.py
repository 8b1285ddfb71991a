"""Offloaded layers and inputs against recomputed and kept ones: the same bits after 20 steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_runs import train_streamed
from plain_torch import PlainRun, tiny_model, token_batches
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain_accelerate.transfer import activation_offload

pytestmark = pytest.mark.usefixtures("profiled_once")

STEPS = 20


def tiny_llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_dropout=0.1,
        )
    )


def tiny_qwen() -> nn.Module:
    return tiny_model(attention_dropout=0.2)


@pytest.fixture(autouse=True)
def small_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)


def trained(make: Callable[[], nn.Module], **settings: object) -> PlainRun:
    model = make().train()
    torch.manual_seed(3)
    return train_streamed(model, token_batches(STEPS), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "shared"),
    [
        (tiny_qwen, {}),
        (tiny_llama, {"accumulation": 2}),
        (tiny_qwen, {"slots": 3, "schedule": "serial", "accumulation": 4}),
        (tiny_qwen, {"max_norm": None, "schedule": "backward"}),
    ],
    ids=["deferred", "llama", "serial", "backward"],
)
def test_placement_of_activations_never_changes_the_numbers(make: Callable[[], nn.Module], shared: dict[str, object]) -> None:
    reference = trained(make, **shared)
    for settings in ({"offloaded_layers": 3}, {"kept_layers": 1, "offloaded_layers": 1, "offloaded_inputs": True}):
        run = trained(make, **shared, **settings)
        assert run.losses == reference.losses, settings
        assert run.norms == reference.norms, settings
        for name, master in reference.masters.items():
            assert torch.equal(run.masters[name], master), f"{name} differs with {settings}"

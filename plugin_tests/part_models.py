"""Small mixtures of experts, for tests of experts that stream in parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from families import DECODERS
from family_registry import Family
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS = 6
FAMILIES = {family.name: family for family in DECODERS}


def tiny_experts(implementation: str = "eager", seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of 3 layers of 6 experts each, of which a token meets two, in fp32.

    Args:
        implementation: of the experts; ``eager`` computes each expert's rows alone, so that parts can't change its bits.
        seed: of its weights.
        changes: of its configuration.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "use_cache": False,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **changes}))
    use_implementation(model, implementation)
    return model


def use_implementation(model: nn.Module, implementation: str) -> None:
    """Makes all experts of the model compute by it."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = implementation


def family_with(name: str, implementation: str) -> Family:
    """A family of :mod:`families` whose experts compute by this implementation."""
    family = FAMILIES[name]

    def build() -> nn.Module:
        model = family.build()
        use_implementation(model, implementation)
        return model

    return dataclasses.replace(family, build=build)

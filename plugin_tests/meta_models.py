"""Tiny models without data, as an estimate builds them: on the meta device, in bf16, in train mode."""

from __future__ import annotations

import torch
from plain_torch import tiny_model
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 4096}


def meta_model(**shape: int) -> nn.Module:
    """A Qwen2 of :data:`SHAPE`."""
    with torch.device("meta"):
        return tiny_model(**{**SHAPE, **shape}).to(torch.bfloat16).train()


def meta_experts(records_routing: bool) -> nn.Module:
    """A Qwen3-MoE, with its auxiliary loss if its routers' logits are recorded."""
    with torch.device("meta"):
        config = Qwen3MoeConfig(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            vocab_size=512,
            output_router_logits=records_routing,
            use_cache=False,
        )
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).train()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model

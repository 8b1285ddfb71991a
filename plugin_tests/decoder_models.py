"""What the rows of :mod:`families` are made of: settings that families share, batches, and how a small decoder is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from family_registry import Family
from torch import nn

VOCABULARY = 96
LENGTH = 24
"""Tokens of a batch's rows."""

WINDOW = 6

TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

LLAMA_LIKE: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}

GPT_LIKE: dict[str, Any] = {**TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}

STATE_SPACE: dict[str, Any] = {**TOKENS, "hidden_size": 32, "num_hidden_layers": 3}

MOE: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}

DEEPSEEK_MOE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

LINEAR_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

ZAMBA_2: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layers_block_type": ["mamba", "hybrid"] * 3,
    "hybrid_layer_ids": [1, 3, 5],
    "mamba_d_state": 8,
    "mamba_headdim": 8,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "chunk_size": 8,
    "num_mem_blocks": 2,
    "attention_head_dim": 16,
}

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}

GPT_DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def texts(seed: int) -> dict[str, torch.Tensor]:
    """Three random texts, two of them padded on the right; what is padded isn't labelled. It is so little that layers don't
    leave it out, which would add numbers in another order."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(3, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 2, 5)):
        mask[row, LENGTH - padding :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def whole_texts(seed: int) -> dict[str, torch.Tensor]:
    """Three random texts of one length, without a mask."""
    ids = torch.randint(3, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(100 + seed))
    return {"input_ids": ids, "labels": ids}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder(Family):
    """A text decoder of transformers."""

    plainer: Callable[[], nn.Module] | None = None
    """The model without what is special about the family; None where nothing can be switched off."""


def decoder(
    name: str,
    title: str,
    model: str,
    notes: str,
    changes: dict[str, Any],
    *,
    base: dict[str, Any] = LLAMA_LIKE,
    config: str = "",
    without: dict[str, Any] | None = None,
    **row: Any,
) -> Decoder:
    """A row of the table.

    Args:
        name, title, notes: see :class:`Family`.
        model, config: classes of transformers.
        changes: settings of the model's config, besides the base's.
        base: settings that similar families share.
        without: settings with which the model would lack what is special about it.
        row: further fields of :class:`Family`.
    """
    config = config or model.replace("ForCausalLM", "Config").replace("LMHeadModel", "Config")

    def build(**others: Any) -> nn.Module:
        torch.manual_seed(0)
        settings = getattr(transformers, config)(**{**base, **changes, **others})
        made: nn.Module = getattr(transformers, model)(settings)
        return made.train()

    plainer = None if without is None else lambda: build(**without)
    return Decoder(name=name, title=title, build=build, notes=notes, plainer=plainer, **{"batch": texts, **row})

"""Models of published shapes, from small to large: what a machine can train is said of these where no model is named."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING

from megatrain_accelerate.estimate.findings import Estimate

BATCHES = (1, 4, 16)
"""Sequences of a batch, unless the options name others."""

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "Qwen2.5-0.5B": ("qwen2", (151936, 896, 4864, 24, 14, 2), {"tie_word_embeddings": True}),
    "Qwen2.5-1.5B": ("qwen2", (151936, 1536, 8960, 28, 12, 2), {"tie_word_embeddings": True}),
    "Qwen2.5-3B": ("qwen2", (151936, 2048, 11008, 36, 16, 2), {"tie_word_embeddings": True}),
    "Llama-3.1-8B": ("llama", (128256, 4096, 14336, 32, 32, 8), {}),
    "Qwen2.5-14B": ("qwen2", (152064, 5120, 13824, 48, 40, 8), {}),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        (151936, 2048, 6144, 48, 32, 4),
        {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "Qwen2.5-32B": ("qwen2", (152064, 5120, 27648, 64, 40, 8), {}),
    "Llama-3.1-70B": ("llama", (128256, 8192, 28672, 80, 64, 8), {}),
    "gpt-oss-120b": ("gpt_oss", (), {}),
}
"""By name: the configuration's ``model_type``, its sizes, and what else is not its default."""


def estimates(options: argparse.Namespace) -> Iterator[Estimate]:
    """An estimate of each model that transformers knows, without its limits, when it is made; raises as :class:`Estimate`."""
    for name, (kind, sizes, others) in _SHAPES.items():
        if kind not in CONFIG_MAPPING:
            continue
        asked = copy.copy(options)
        asked.model, asked.batch, asked.no_limits = name, options.batch or list(BATCHES), True
        if options.gpus * options.machines > 1:  # which fetch experts whole
            asked.set = [("expert_parts", 1), *options.set]
        shape = dict(zip(_SIZES, sizes, strict=bool(sizes)))
        yield Estimate(asked, CONFIG_MAPPING[kind](**shape, max_position_embeddings=131072, **others))

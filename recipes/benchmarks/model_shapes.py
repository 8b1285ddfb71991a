"""Models of published shapes, with random weights, and the useful FLOPs of their steps."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)


def _qwen2(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool
) -> tuple[type[PreTrainedConfig], dict[str, Any]]:
    return Qwen2Config, {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }


def _qwen3_moe(
    vocabulary: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: int,
    used: int,
    expert_size: int,
) -> tuple[type[PreTrainedConfig], dict[str, Any]]:
    return Qwen3MoeConfig, {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": expert_size,
        "norm_topk_prob": True,
        "output_router_logits": True,  # the auxiliary loss, weighted by 0.001
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }


PRESETS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "tiny": _qwen2(512, 64, 176, 4, 4, 2, True),
    "0.5b": _qwen2(151936, 896, 4864, 24, 14, 2, True),
    "1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2, True),
    "3b": _qwen2(151936, 2048, 11008, 36, 16, 2, True),
    "7b": _qwen2(152064, 3584, 18944, 28, 28, 4, False),
    "14b": _qwen2(152064, 5120, 13824, 48, 40, 8, False),
    "32b": _qwen2(152064, 5120, 27648, 64, 40, 8, False),
    "72b": _qwen2(152064, 8192, 29568, 80, 64, 8, False),
    "tiny_moe": _qwen3_moe(512, 64, 4, 4, 2, 16, 4, 2, 48),
    "30b_a3b": _qwen3_moe(151936, 2048, 48, 32, 4, 128, 128, 8, 768),
    "llama_8b": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "llama_70b": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "gpt_oss_120b": (GptOssConfig, {"output_router_logits": True}),
}
"""Configurations as published: of Qwen2.5, Qwen3-30B-A3B, Llama 3, and gpt-oss-120b, whose configuration class has its
sizes as defaults; and two tiny ones."""


def shape_config(preset: str, length: int, layers: int | None = None) -> PreTrainedConfig:
    """The configuration of a preset.

    Args:
        preset: a name in :data:`PRESETS`.
        length: of the sequences.
        layers: the preset's by default.
    """
    kind, values = PRESETS[preset]
    values = {"max_position_embeddings": max(32768, length), "use_cache": False, **values}
    if layers:
        values["num_hidden_layers"] = layers
    return kind(**values)


def empty_model(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The model on the meta device; its rotary frequencies, which no weights are made of, are there."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def build_model(
    preset: str,
    length: int,
    layers: int | None = None,
    without_weights: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """The preset's model in host memory, filled with random values that the GPU draws where there is one.

    Args:
        preset, length, layers: see :func:`shape_config`.
        without_weights: leave the filling to whoever prepares the model.
        dtype: of the weights.
    """
    model = empty_model(shape_config(preset, length, layers), dtype)
    return model if without_weights else _filled(model)


def _filled(model: Any) -> PreTrainedModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        owner_name, _, attribute = name.rpartition(".")
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.dim() > 1:
            value.normal_(0.0, 0.02, generator=generator)
        else:
            value.fill_(0.0 if attribute == "bias" else 1.0)
        setattr(model.get_submodule(owner_name), attribute, torch.nn.Parameter(value.to("cpu")))
    model.tie_weights()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def active_parameters(model: PreTrainedModel) -> int:
    """Parameters that one token is multiplied with: of the experts, only those that it is sent to."""
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = sum(parameter.numel() for parameter in model.parameters())
    if not experts:
        return total
    config = model.config
    count = getattr(config, "num_experts", None) or config.num_local_experts
    return total - experts + experts * config.num_experts_per_tok // count


def step_flops(config: PreTrainedConfig, parameters: int, batch: int, length: int) -> tuple[float, float]:
    """Useful FLOPs of a step: of the weights alone, and with causal attention. Nothing recomputed counts.

    6 N a token for N parameters that a token meets. Attention's two products take 2 x 2 x H FLOPs for a pair of tokens and a
    layer whose heads have H elements, backward twice as much: 12 H. Of T tokens T^2 / 2 pairs count; under a window of W of
    them T W - W^2 / 2.
    """
    weights = 6.0 * parameters * batch * length
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = [min(length, config.sliding_window) if kind == "sliding_attention" else length for kind in kinds]
    pairs = sum(length * window - window**2 / 2 for window in windows)
    return weights, weights + 12.0 * batch * pairs * config.num_attention_heads * head_size

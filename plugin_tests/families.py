"""Small text decoders of every family that is compared with plain PyTorch: two to four layers, tiny vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from family_registry import Family
from torch import nn

VOCABULARY = 96
LENGTH = 24
"""Tokens of a batch's rows: more than the sliding windows of the models here."""

WINDOW = 6

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def model_of(model: str, config: str, changes: dict[str, Any], base: dict[str, Any] = LLAMA_LIKE) -> Callable[[], nn.Module]:
    """Builds ``transformers.<model>`` from ``transformers.<config>`` with the base's settings and ``changes``."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**{**base, **changes}))
        return made.train()

    return build


def texts(seed: int) -> dict[str, torch.Tensor]:
    """Three random texts, two of them padded on the right; what is padded isn't labelled."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(3, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 3, 7)):
        mask[row, LENGTH - padding :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def whole_texts(seed: int) -> dict[str, torch.Tensor]:
    """Two random texts of one length, without a mask."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(100 + seed))
    return {"input_ids": ids, "labels": ids}


def _decoder(name: str, title: str, model: str, notes: str = "", config: str = "", **changes: Any) -> Family:
    base = changes.pop("base", LLAMA_LIKE)
    batch = changes.pop("batch", texts)
    known = {key: changes.pop(key) for key in ("tolerance", "settings", "refusal") if key in changes}
    config = config or model.replace("ForCausalLM", "Config").replace("LMHeadModel", "Config")
    return Family(name=name, title=title, build=model_of(model, config, changes, base), batch=batch, notes=notes, **known)


MOE = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}

DECODERS: tuple[Family, ...] = (
    _decoder(
        "llama3",
        "Llama 3",
        "LlamaForCausalLM",
        "scaled rotary frequencies, dropout in attention",
        attention_dropout=0.1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    _decoder(
        "llama4",
        "Llama 4 (text)",
        "Llama4ForCausalLM",
        "chunked attention, layers without rotary positions, experts in every other layer and a shared one",
        config="Llama4TextConfig",
        num_hidden_layers=4,
        intermediate_size_mlp=48,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=8,
        **MOE,
    ),
    _decoder(
        "qwen2",
        "Qwen2, Qwen2.5",
        "Qwen2ForCausalLM",
        "biases, windows in the later layers",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    _decoder("qwen3", "Qwen3", "Qwen3ForCausalLM", "normed queries and keys, tied head", tie_word_embeddings=True),
    _decoder(
        "qwen3_moe",
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "experts, auxiliary loss",
        num_experts=4,
        moe_intermediate_size=16,
        **MOE,
    ),
    _decoder(
        "qwen3_next",
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        "",
        num_hidden_layers=4,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        **MOE,
    ),
    _decoder("mistral", "Mistral", "MistralForCausalLM", "", sliding_window=WINDOW, attention_dropout=0.1),
    _decoder(
        "mixtral",
        "Mixtral",
        "MixtralForCausalLM",
        "",
        num_local_experts=4,
        sliding_window=WINDOW,
        router_jitter_noise=0.1,
        **MOE,
    ),
    _decoder(
        "gemma2",
        "Gemma 2",
        "Gemma2ForCausalLM",
        "",
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        attn_implementation="eager",
    ),
    _decoder(
        "gemma3",
        "Gemma 3 (text)",
        "Gemma3ForCausalLM",
        "",
        config="Gemma3TextConfig",
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    _decoder(
        "phi3", "Phi-3", "Phi3ForCausalLM", "", resid_pdrop=0.1, embd_pdrop=0.1, attention_dropout=0.1, sliding_window=WINDOW
    ),
    _decoder(
        "phi4",
        "Phi-4",
        "Phi3ForCausalLM",
        "",
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 4.0],
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.75,
        },
        original_max_position_embeddings=16,
    ),
    _decoder("gpt_oss", "GPT-OSS", "GptOssForCausalLM", "", num_local_experts=4, sliding_window=WINDOW, **MOE),
    _decoder(
        "granite",
        "Granite",
        "GraniteForCausalLM",
        "",
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
        attention_dropout=0.1,
    ),
    _decoder("cohere", "Cohere (Command R)", "CohereForCausalLM", "", use_qk_norm=True),
    _decoder("cohere2", "Cohere 2 (Command R7B, A)", "Cohere2ForCausalLM", "", sliding_window=WINDOW, num_hidden_layers=4),
    _decoder("olmo2", "OLMo 2", "Olmo2ForCausalLM", ""),
    _decoder("smollm3", "SmolLM3", "SmolLM3ForCausalLM", "", no_rope_layer_interval=2),
    _decoder(
        "deepseek_v3",
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        "",
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        head_dim=4,
        num_key_value_heads=4,
    ),
    _decoder("glm4", "GLM-4", "Glm4ForCausalLM", ""),
    _decoder(
        "gpt2",
        "GPT-2",
        "GPT2LMHeadModel",
        "",
        base={},
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _decoder(
        "opt",
        "OPT",
        "OPTForCausalLM",
        "",
        base={},
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        dropout=0.1,
        attention_dropout=0.1,
        layerdrop=0.4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _decoder(
        "falcon",
        "Falcon",
        "FalconForCausalLM",
        "",
        base={},
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    _decoder(
        "mamba",
        "Mamba",
        "MambaForCausalLM",
        "",
        base={},
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        state_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _decoder(
        "mamba2",
        "Mamba 2",
        "Mamba2ForCausalLM",
        "",
        base={},
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
)

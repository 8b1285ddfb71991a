"""Models of many kinds, and usual things that are done with a whole model: losses and gradients are those of plain PyTorch,
bit for bit, whatever becomes of the layers' activations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import DECODERS, REFUSED
from families_other import BART, BERT_LIKE, OTHERS, T5, masked_texts, translations
from family_models import TOWER, VOCABULARY, Build, Inputs, build_of, config_of, words
from layer_uses import Case, Step, backward_of, check, each_placement
from torch import nn
from versions import enable_checkpointing

FAMILIES = {family.name: family for family in (*DECODERS, *REFUSED, *OTHERS)}


pytestmark = pytest.mark.usefixtures("without_predictions")


def text(seed: int = 0, length: int = 12) -> Inputs:
    """Two texts that are their own labels."""
    ids = words(seed, 2, length)
    return {"input_ids": ids, "labels": ids}


def training_on(*batches: Inputs) -> Step:
    """A forward and a backward for each batch."""
    return lambda model: [seen for batch in batches for seen in backward_of(model(**batch).loss)]


def family(name: str, *batches: Inputs, **more: Any) -> Case:
    """The family's model on these batches, by default on its own first."""
    row = FAMILIES[name]
    return Case(build=row.build, step=training_on(*(batches or [row.batch(0)])), settings=row.settings, **more)


LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def llama(**changes: Any) -> Build:
    """A Llama of four layers."""
    return build_of("LlamaForCausalLM", config_of("LlamaConfig", **{**LLAMA, **changes}))


def only_trained(build: Build, *parts: str) -> Build:
    """The same model with all parameters frozen but those whose names contain one of the parts."""

    def build_frozen() -> nn.Module:
        model = build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in parts))
        return model

    return build_frozen


def auxiliary_loss_alone(model: Any) -> list[torch.Tensor]:
    """The experts' balance is all that is trained for."""
    return backward_of(model(**text(), output_router_logits=True).aux_loss)


def under_autocast(model: Any) -> list[torch.Tensor]:
    """The forward computes in bf16 where autocast says so."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**text()).loss
    return backward_of(loss)


JAMBA = {
    **LLAMA,
    "use_mamba_kernels": False,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_d_state": 4,
    "mamba_dt_rank": 2,
    "output_router_logits": True,
}

DECODER_CASES = {
    "llama": Case(build=llama(), step=training_on(text())),
    "llama_with_dropout": Case(build=llama(attention_dropout=0.3), step=training_on(text())),
    "llama_asked_for_a_cache": Case(build=llama(use_cache=True), step=training_on(text())),
    "llama_under_autocast": Case(build=llama(), step=under_autocast),
    "mixtral": family("mixtral", text()),
    "qwen3_moe": family("qwen3_moe", text()),
    "qwen3_moe_auxiliary_loss_alone": Case(build=FAMILIES["qwen3_moe"].build, step=auxiliary_loss_alone),
    "gemma2": family("gemma2", text()),
    "gemma3": family("gemma3", text()),
    "mamba": family("mamba", text(length=6)),
    "jamba": Case(build=build_of("JambaForCausalLM", config_of("JambaConfig", **JAMBA)), step=training_on(text(length=6))),
    "zamba2_mamba_layers": family("zamba2", text(length=6)),
}


@each_placement(DECODER_CASES)
def test_a_text_decoder_trains_as_in_plain_pytorch(case: Case, placement: str) -> None:
    check(case, placement)


def speech(seed: int = 0) -> Inputs:
    """Two sounds of 20 frames, and what is said."""
    frames = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(seed))
    return {"input_features": frames, "labels": words(seed, 2, 7)}


def captioned_pictures() -> Inputs:
    """Two pictures and their captions."""
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return {"input_ids": words(0, 2, 12), "pixel_values": pixels, "return_loss": True}


WHISPER = {
    **{key: value for key, value in BART.items() if key not in ("max_position_embeddings", "init_std", "forced_eos_token_id")},
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 16,
    "use_cache": False,
}
CLIP = {"text_config": {**BERT_LIKE, "eos_token_id": 2}, "vision_config": TOWER, "projection_dim": 16}
ALBERT = {**BERT_LIKE, "embedding_size": 16, "hidden_dropout_prob": 0.1}


def t5(**changes: Any) -> Build:
    """A T5 with dropout."""
    return build_of("T5ForConditionalGeneration", config_of("T5Config", **{**T5, **changes}))


def whisper(**changes: Any) -> Build:
    """A Whisper for sounds of 20 frames."""
    return build_of("WhisperForConditionalGeneration", config_of("WhisperConfig", **WHISPER, **changes))


def layers_left_out(place: str) -> dict[str, float]:
    """Encoder and decoder layers that are left out at random."""
    return {f"encoder_{place}": 0.4, f"decoder_{place}": 0.4}


bart = build_of(
    "BartForConditionalGeneration", config_of("BartConfig", **BART, **layers_left_out("layerdrop"), use_cache=False)
)
clip = build_of("CLIPModel", config_of("CLIPConfig", **CLIP))
albert = build_of("AlbertForMaskedLM", config_of("AlbertConfig", **ALBERT))

OTHER_CASES = {
    "t5": Case(build=t5(), step=training_on(translations(0))),
    # A layer that may run again gets no cache. Keys lie otherwise in the memory of one, and attention rounds otherwise.
    "t5_asked_for_a_cache": Case(build=t5(use_cache=True), plain_build=t5(), step=training_on(translations(0))),
    "bart_with_layers_left_out": Case(build=bart, step=training_on(translations(0), translations(1))),
    "whisper": Case(build=whisper(), step=training_on(speech())),
    "whisper_with_layers_left_out": Case(
        build=whisper(**layers_left_out("layerdrop"), dropout=0.1), step=training_on(speech(0), speech(1))
    ),
    "bert": family("bert_mlm"),
    "albert": Case(build=albert, step=training_on(masked_texts(0)), settings={"layer_classes": ["AlbertLayer"]}),
    "albert_accumulating": Case(
        build=albert, step=training_on(masked_texts(0), masked_texts(1)), settings={"layer_classes": ["AlbertLayer"]}
    ),
    "clip": Case(build=clip, step=training_on(captioned_pictures())),
    "clip_with_frozen_embeddings": Case(
        build=only_trained(clip, "encoder", "projection", "logit_scale"), step=training_on(captioned_pictures())
    ),
    "llava": family("llava"),
    "qwen2_5_vl": family("qwen2_5_vl"),
}


@each_placement(OTHER_CASES)
def test_a_model_of_another_kind_trains_as_in_plain_pytorch(case: Case, placement: str) -> None:
    check(case, placement)


FROZEN_CASES = {
    "last_layers_trained": Case(build=only_trained(llama(), "layers.2", "layers.3"), step=training_on(text())),
    "head_trained": Case(build=only_trained(llama(), "lm_head"), step=training_on(text())),
    "first_layer_trained": Case(build=only_trained(llama(), "layers.0"), step=training_on(text())),
    "norms_trained": Case(build=only_trained(llama(), "layernorm"), step=training_on(text())),
    "biases_trained": Case(
        build=only_trained(FAMILIES["bert_mlm"].build, "query.bias", "key.bias", "value.bias", "dense.bias"),
        step=training_on(masked_texts(0)),
    ),
}


@each_placement(FROZEN_CASES)
def test_a_model_with_frozen_parts_trains_as_in_plain_pytorch(case: Case, placement: str) -> None:
    check(case, placement)


def all_hidden_states_in_the_loss(model: Any) -> list[torch.Tensor]:
    """What each layer returns is used twice: by the next layer, and by the loss."""
    output = model(**text(), output_hidden_states=True)
    return backward_of(output.loss + sum(hidden.pow(2).mean() for hidden in output.hidden_states))


def inner_hidden_states_alone(model: Any) -> list[torch.Tensor]:
    """The last two layers run, and the loss depends on nothing of theirs."""
    return backward_of(model(**text(), output_hidden_states=True).hidden_states[2].pow(2).mean())


def batches_of_several_lengths(model: Any) -> list[torch.Tensor]:
    """Gradients of four batches add up."""
    return [seen for seed in range(4) for seen in backward_of(model(**text(seed, length=7 + seed)).loss / 4)]


def evaluation_and_then_training(model: Any) -> list[torch.Tensor]:
    """Losses without gradients, generated tokens, and a training step."""
    model.eval()
    with torch.no_grad():
        without_grad = model(**text()).loss
    with torch.inference_mode():
        in_inference_mode = model(**text(1)).loss.item()
    prompt = words(2, 2, 4)
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False, use_cache=True)
    model.train()
    return [without_grad, torch.tensor(in_inference_mode), tokens, *backward_of(model(**text()).loss)]


def one_layer_by_itself(model: Any) -> list[torch.Tensor]:
    """A leaf goes into the first layer three times; hooks that the engine would leave on it would pile up."""
    hidden = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    positions = model.model.rotary_emb(hidden, torch.arange(6)[None])
    seen: list[torch.Tensor] = []
    for _ in range(3):
        seen += backward_of(model.model.layers[0](hidden, position_embeddings=positions).pow(2).sum())
    assert hidden.grad is not None
    return [*seen, hidden.grad, torch.tensor(len(hidden._backward_hooks or ()))]


def checkpointing_switched_on() -> nn.Module:
    """A Llama with dropout that is to recompute its layers, as the Trainer asks for it."""
    model = llama(attention_dropout=0.2)()
    enable_checkpointing(model)
    return model


USES = {
    "hidden_states_in_the_loss": Case(build=llama(), step=all_hidden_states_in_the_loss),
    "inner_hidden_states_alone": Case(build=llama(), step=inner_hidden_states_alone),
    "several_lengths": Case(build=llama(attention_dropout=0.1), step=batches_of_several_lengths),
    "evaluation_and_then_training": Case(build=llama(), step=evaluation_and_then_training),
    "one_layer_by_itself": Case(build=llama(), step=one_layer_by_itself),
    "gradient_checkpointing": Case(build=checkpointing_switched_on, step=training_on(text())),
}


@each_placement(USES)
def test_a_use_of_a_whole_model_gives_what_plain_pytorch_gives(case: Case, placement: str) -> None:
    check(case, placement)

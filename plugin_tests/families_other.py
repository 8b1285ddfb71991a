"""Small encoders and encoder-decoders of every family that is compared with plain PyTorch; with families_vision.py, all but
text decoders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from families_vision import VISION_LANGUAGE
from family_models import IMAGE, TOWER, VOCABULARY, Inputs, build_of, classes, config_of, words
from family_registry import Family
from torch import nn

# ------------------------------------------------------------------------------------------------ encoders


def padded_texts(seed: int) -> Inputs:
    """Two texts, one of them padded."""
    ids = words(seed, 2, 12)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def masked_texts(seed: int) -> Inputs:
    """Texts in which a third of the tokens is masked and labelled."""
    inputs = padded_texts(seed)
    chosen = (words(seed + 50, 2, 12) < IMAGE // 3) & (inputs["attention_mask"] == 1)
    labels = inputs["input_ids"].masked_fill(~chosen, -100)
    return {**inputs, "input_ids": inputs["input_ids"].masked_fill(chosen, 4), "labels": labels}


def classified_texts(seed: int) -> Inputs:
    """Texts with a class each."""
    return {**padded_texts(seed), "labels": classes(seed)}


def paired_texts(seed: int) -> Inputs:
    """Masked texts, and whether each one's two sentences follow each other."""
    kinds = (torch.arange(12) > 5).long().expand(2, -1)
    return {**masked_texts(seed), "next_sentence_label": classes(seed) % 2, "token_type_ids": kinds}


def classified_pictures(seed: int) -> Inputs:
    """Pictures of 16 by 16 with a class each."""
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed)), "labels": classes(seed)}


def unused_pooler(model: Any) -> None:
    """Checkpoints of old have a pooler that masked language modelling doesn't use."""
    model.bert.pooler = transformers.models.bert.modeling_bert.BertPooler(model.config)


BERT_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
MODERNBERT = {
    **BERT_LIKE,
    "num_hidden_layers": 4,
    "local_attention": 6,
    "global_attn_every_n_layers": 3,
    **{f"{token}_token_id": place for place, token in enumerate(("bos", "cls", "eos", "sep"), start=1)},
}
MODERNBERT_DROPOUT = {f"{place}_dropout": 0.1 for place in ("attention", "mlp", "embedding", "classifier")}
DEBERTA = {
    **BERT_LIKE,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 8,
}


def _encoder(name: str, title: str, model: str, config: Callable[[], Any], batch: Any, notes: str = "", **more: Any) -> Family:
    build = build_of(model, config, more.pop("change", None))
    return Family(name=name, title=title, build=build, batch=batch, kind="encoder", notes=notes, **more)


ENCODERS = (
    _encoder(
        "bert_mlm",
        "BERT, masked LM",
        "BertForMaskedLM",
        config_of("BertConfig", **BERT_LIKE),
        masked_texts,
        "decoder tied to the embeddings, dropout, a pooler without use",
        change=unused_pooler,
    ),
    _encoder(
        "bert_classifier",
        "BERT, sequence classification",
        "BertForSequenceClassification",
        config_of("BertConfig", **BERT_LIKE, num_labels=3),
        classified_texts,
        "a new head, dropout",
    ),
    _encoder(
        "bert_pretraining",
        "BERT, both of its losses",
        "BertForPreTraining",
        config_of("BertConfig", **BERT_LIKE),
        paired_texts,
        "pooler and tied decoder",
    ),
    _encoder(
        "modernbert_mlm",
        "ModernBERT, masked LM",
        "ModernBertForMaskedLM",
        config_of("ModernBertConfig", **MODERNBERT),
        masked_texts,
        "local and global attention, tied decoder",
    ),
    _encoder(
        "modernbert_classifier",
        "ModernBERT, sequence classification",
        "ModernBertForSequenceClassification",
        config_of("ModernBertConfig", **MODERNBERT, **MODERNBERT_DROPOUT, num_labels=3),
        classified_texts,
        "a new head, dropout",
    ),
    _encoder(
        "deberta_classifier",
        "DeBERTa-v2/v3, sequence classification",
        "DebertaV2ForSequenceClassification",
        config_of("DebertaV2Config", **DEBERTA, num_labels=3),
        classified_texts,
        "relative positions whose weight all layers read, dropout",
    ),
    _encoder(
        "siglip_classifier",
        "SigLIP, image classification",
        "SiglipForImageClassification",
        lambda: transformers.SiglipConfig(vision_config=TOWER, text_config=BERT_LIKE, num_labels=3),
        classified_pictures,
        "a pooling head without use",
    ),
    _encoder(
        "albert_mlm",
        "ALBERT with one group",
        "AlbertForMaskedLM",
        config_of("AlbertConfig", **BERT_LIKE, embedding_size=16),
        masked_texts,
        "one layer runs again and again: nothing is repeated in memory; `layer_classes: [AlbertLayer]` streams it",
        refusal=r"AlbertForMaskedLM has no repeated layers.*layer_classes, or train it without the plugin",
    ),
)

# ------------------------------------------------------------------------------------------------ encoder-decoders


def _view_of(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value


def _own_uses(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_view_of, args)), {name: _view_of(value) for name, value in kwargs.items()}


def sum_within_layers(model: nn.Module) -> None:
    """Each decoder layer adds up its own gradients of the encoder's output before they are added to the other layers'.

    A streamed layer does so in any case. autograd adds the gradients of keys and values one by one, over all layers: sums in
    another order, which round differently.
    """
    for name, module in model.named_modules():
        if "decoder." in name and isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList):
            module.register_forward_pre_hook(_own_uses, with_kwargs=True)


def translations(seed: int) -> Inputs:
    """Two texts, one padded, and what they should become, one shorter than the other."""
    labels = words(seed + 50, 2, 9)
    labels[1, 7:] = -100
    return {**padded_texts(seed), "labels": labels}


def classified_endings(seed: int) -> Inputs:
    """Texts that end with the token that is classified."""
    ids = torch.cat([words(seed, 2, 11), torch.full((2, 1), 2)], 1)
    return {"input_ids": ids, "labels": classes(seed)}


T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    # A plain run's cache copies keys to another memory layout, and attention with a bias rounds differently then.
    "use_cache": False,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    **{f"{stack}_{part}": n for stack in ("encoder", "decoder") for part, n in (("attention_heads", 4), ("ffn_dim", 48))},
    "max_position_embeddings": 32,
    "init_std": 0.2,
    **{f"{token}_token_id": place for place, token in enumerate(("pad", "bos", "eos", "decoder_start"))},
    "forced_eos_token_id": 2,
}


def _encoder_decoder(name: str, title: str, model: str, config: Callable[[], Any], batch: Any, notes: str) -> Family:
    build = build_of(model, config, sum_within_layers)
    notes = f"{notes}; in both runs each decoder layer sums its gradients of the encoder's output first"
    return Family(name=name, title=title, build=build, batch=batch, kind="encoder-decoder", notes=notes)


ENCODER_DECODERS = (
    _encoder_decoder(
        "t5",
        "T5",
        "T5ForConditionalGeneration",
        config_of("T5Config", **T5),
        translations,
        "one embedding for encoder, decoder and head; position biases made by the first layer; dropout",
    ),
    _encoder_decoder(
        "t5_gated",
        "T5 v1.1, Flan-T5",
        "T5ForConditionalGeneration",
        config_of("T5Config", **T5, tie_word_embeddings=False, feed_forward_proj="gated-gelu", dropout_rate=0.0),
        translations,
        "a head of its own, gated feed-forward, no dropout: attention takes another kernel where its bias is trained",
    ),
    _encoder_decoder(
        "t5_classifier",
        "T5, sequence classification",
        "T5ForSequenceClassification",
        config_of("T5Config", **T5, num_labels=3),
        classified_endings,
        "a new head on the decoder",
    ),
    _encoder_decoder(
        "umt5",
        "UMT5",
        "UMT5ForConditionalGeneration",
        config_of("UMT5Config", **T5),
        translations,
        "position biases in every layer",
    ),
    _encoder_decoder(
        "bart",
        "BART",
        "BartForConditionalGeneration",
        config_of("BartConfig", **BART, encoder_layerdrop=0.3, decoder_layerdrop=0.3),
        translations,
        "tied embeddings, dropout, whole layers dropped at random",
    ),
    _encoder_decoder(
        "bart_classifier",
        "BART, sequence classification",
        "BartForSequenceClassification",
        config_of("BartConfig", **BART, num_labels=3),
        classified_endings,
        "a new head on the decoder",
    ),
)

OTHERS: tuple[Family, ...] = (*VISION_LANGUAGE, *ENCODER_DECODERS, *ENCODERS)

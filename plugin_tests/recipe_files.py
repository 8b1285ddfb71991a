"""Small models, tokenizers and data sets in the form that the recipes read: folders of files, nothing from a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen2TokenizerFast,
)

SENTENCES = [f"{first} and {second} make {first + second}." for first in range(12) for second in range(12)]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def make_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level tokenizer of 300 tokens with a chat template."""
    tokenizer = Qwen2TokenizerFast().train_new_from_iterator(SENTENCES, 300, show_progress=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_decoder(folder: Path) -> Path:
    """A causal language model with its tokenizer."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **SHAPE, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_encoder(folder: Path) -> Path:
    """An encoder with its tokenizer."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SHAPE)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    """A data set as a folder with one file of JSON lines a split."""
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def question(number: int) -> str:
    """A question that has a number as its answer."""
    return f"What do {number} and 3 make?"

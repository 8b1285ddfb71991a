"""Runs of TRL's trainers with and without the plugin: a tokenizer, data and models made in the test, nothing downloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from trainer_runs import TOLERANCE, TrainerRun, assert_same_run, plugin, short_run, snapshot, tiny_llama
from transformers import PreTrainedTokenizerFast

from megatrain_accelerate.engine import engine_of

WORDS = [f"{kind}{number}" for kind in ("noun", "verb", "article") for number in range(8)]
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<user>", "<assistant>", "<end>"]

# Generation markers, so that the assistant's turns can be told apart (assistant_only_loss).
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<assistant> {% generation %}{{ message['content'] }} <end>{% endgeneration %} "
    "{% else %}<user> {{ message['content'] }} <end> {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)

# What TRL itself warns about in versions and settings that the tests mean.
TRL_WARNINGS = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning:trl",
    "ignore::UserWarning:peft",
    "ignore::UserWarning:torch.utils.data",
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of :data:`WORDS`, with a chat template."""
    vocabulary = {word: place for place, word in enumerate([*SPECIAL, *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL[4:]})
    made.chat_template = CHAT_TEMPLATE
    return made


def sentence(generator: torch.Generator, low: int, high: int) -> str:
    """Between ``low`` and ``high`` random words."""
    count = int(torch.randint(low, high + 1, (), generator=generator))
    return " ".join(WORDS[place] for place in torch.randint(0, len(WORDS), (count,), generator=generator).tolist())


def rows(make_row: Callable[[torch.Generator], dict[str, Any]], count: int = 12) -> Dataset:
    """``count`` rows, the same at each call."""
    generator = torch.Generator().manual_seed(7)
    return Dataset.from_list([make_row(generator) for _ in range(count)])


def texts(count: int = 12) -> Dataset:
    """Plain texts of 3 to 14 words."""
    return rows(lambda generator: {"text": sentence(generator, 3, 14)}, count)


def prompts_and_completions(count: int = 12) -> Dataset:
    """Prompts with completions."""
    return rows(lambda g: {"prompt": sentence(g, 2, 6), "completion": " " + sentence(g, 2, 8)}, count)


def conversations(count: int = 12) -> Dataset:
    """Chats of two turns each."""

    def chat(generator: torch.Generator) -> dict[str, Any]:
        roles = ["user", "assistant", "user", "assistant"]
        return {"messages": [{"role": role, "content": sentence(generator, 1, 4)} for role in roles]}

    return rows(chat, count)


def preferences(count: int = 8) -> Dataset:
    """A prompt with a chosen and a rejected answer."""
    return rows(
        lambda g: {"prompt": sentence(g, 2, 5), "chosen": " " + sentence(g, 2, 6), "rejected": " " + sentence(g, 2, 6)}, count
    )


def prompts(count: int = 8) -> Dataset:
    """Prompts only."""
    return rows(lambda generator: {"prompt": sentence(generator, 2, 5)}, count)


def tiny_model(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A tiny Llama with the tokenizer's vocabulary."""
    names = {"vocab_size": len(tokenizer()), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    model: nn.Module = tiny_llama(**{**names, **changes}).to(dtype)
    return model


def arguments(config_class: Any, folder: Path, **changes: Any) -> Any:
    """A config of TRL for a short run on the CPU in fp32 that logs every step."""
    return config_class(**{**short_run(folder), "bf16": False, "max_steps": 4, **changes})


def run_trl(
    make_trainer: Callable[[Path], Any],
    folder: Path,
    *,
    streamed: bool,
    script: Callable[[Any], Any] = lambda trainer: trainer.train(),
    settings: dict[str, Any] | None = None,
) -> TrainerRun:
    """Trains as a user's script would.

    Args:
        make_trainer: makes the trainer, given the output directory.
        folder: the output directory.
        streamed: with the plugin.
        script: what is done with the trainer.
        settings: the plugin's.
    """
    with plugin(streamed, **(settings or {})):
        torch.manual_seed(1)
        trainer = make_trainer(folder)
        initial = snapshot(trainer.model)
        script(trainer)
        assert (engine_of(trainer.model) is not None) == streamed, "the run must be streamed if and only if the plugin is on"
        return TrainerRun(trainer, initial, snapshot(trainer.model))


def run_both(
    make_trainer: Callable[[Path], Any], folder: Path, tolerance: float = TOLERANCE, **changes: Any
) -> tuple[TrainerRun, TrainerRun]:
    """(stock, streamed) runs of the same script; all logged numbers and all weights are compared."""
    stock = run_trl(make_trainer, folder / "stock", streamed=False, **changes)
    streamed = run_trl(make_trainer, folder / "streamed", streamed=True, **changes)
    assert_same_run(streamed, stock, tolerance)
    return stock, streamed

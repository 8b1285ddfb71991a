"""Trains a causal language model with the stock `transformers.Trainer`: from a preset on text that every Python has,
or from `--model_name_or_path` on a data set or file of yours. How it is launched decides where the weights live.

    accelerate launch --config recipes/megatrain.yaml recipes/train_causal_lm.py --output_dir outputs/run --bf16
"""

from __future__ import annotations

import itertools
import os
import random
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, DatasetDict, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2TokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

TOKENIZER_DOCUMENTS = 20_000
FILE_LOADERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
# Tests, generated tables and third-party code: long, repetitive, and different from one installation to the next.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "ensurepip", "site-packages", "dist-packages"}

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 320,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "tie_word_embeddings": True,
    },
    "1b": {
        "vocab_size": 16384,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}


@dataclass
class ScriptArguments:
    """Which model, which text."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "A saved model; without it, a new one."})
    model_size: Literal["auto", "tiny", "1b"] = field(
        default="auto", metadata={"help": "Shape of a new model; auto is 1b on a GPU and tiny without one."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "A data set of the Hub, or a local folder."})
    dataset_config: str | None = field(default=None, metadata={"help": "The data set's configuration."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    train_file: str | None = field(
        default=None, metadata={"help": f"A local file instead of a data set: {', '.join(FILE_LOADERS)}."}
    )
    block_size: int = field(default=1024, metadata={"help": "Tokens in a training example."})
    eval_fraction: float = field(default=0.05, metadata={"help": "Share of the documents that is held out."})
    max_eval_blocks: int | None = field(default=None, metadata={"help": "Upper limit of the examples held out."})
    max_text_mib: float = field(default=8.0, metadata={"help": "Upper limit of the default text, in MiB."})

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.max_text_mib <= 0 or not 0 < self.eval_fraction < 1:
            raise SystemExit(
                "--block_size and --max_text_mib must be above 0 and --eval_fraction between 0 and 1; got "
                f"{self.block_size}, {self.max_text_mib:g} and {self.eval_fraction:g}"
            )


def standard_library_documents(max_bytes: int, seed: int) -> list[str]:
    """Sources, docstrings included, of the running interpreter's standard library; the same for the same seed."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
    if not paths:
        raise SystemExit(f"no sources of the standard library in {root}; name a text by --train_file or --dataset_name")
    random.Random(seed).shuffle(paths)
    documents, total_bytes = [], 0
    for path in paths:
        source = path.read_bytes()
        if total_bytes + len(source) > max_bytes:
            break
        total_bytes += len(source)
        documents.append(source.decode("utf-8", errors="replace"))
    return documents


def load_documents(args: ScriptArguments, seed: int) -> DatasetDict:
    """The text as documents, in the splits `train` and `test`, in the column `args.text_column`."""
    if args.train_file is not None:
        suffix = Path(args.train_file).suffix
        if suffix not in FILE_LOADERS:
            raise SystemExit(f"--train_file {args.train_file}: the suffix must be one of {', '.join(FILE_LOADERS)}")
        documents = load_dataset(FILE_LOADERS[suffix], data_files=args.train_file, split="train")
    elif args.dataset_name is not None:
        documents = load_dataset(args.dataset_name, args.dataset_config, split="train")
    else:
        texts = standard_library_documents(int(args.max_text_mib * 2**20), seed)
        documents = Dataset.from_dict({args.text_column: texts})
    if args.text_column not in documents.column_names:
        columns = ", ".join(documents.column_names)
        raise SystemExit(f"the data has no column {args.text_column!r} but {columns}; name one with --text_column")
    return documents.train_test_split(test_size=args.eval_fraction, seed=seed)


def build_model(args: ScriptArguments, train_documents: Dataset) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The saved model that was asked for, or a new one with a byte-level BPE tokenizer made from the text."""
    if args.model_name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
        return model, AutoTokenizer.from_pretrained(args.model_name_or_path)
    size = args.model_size
    if size == "auto":
        size = "1b" if torch.cuda.is_available() else "tiny"
    preset = MODEL_PRESETS[size]
    texts = itertools.islice(train_documents[args.text_column], TOKENIZER_DOCUMENTS)
    # Qwen2's class and no other: AutoTokenizer loads the tokenizer of a Qwen2 model with its rules for splitting words.
    tokenizer = Qwen2TokenizerFast().train_new_from_iterator(texts, preset["vocab_size"], show_progress=False)
    config = Qwen2Config(
        **preset,
        max_position_embeddings=max(args.block_size, 2048),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config), tokenizer


def pack(documents: DatasetDict, tokenizer: PreTrainedTokenizerBase, text_column: str, block_size: int) -> DatasetDict:
    """Documents, each closed by the end-of-text token, laid end to end and cut into blocks of equal length."""

    def to_blocks(batch: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(batch[text_column], add_special_tokens=False)["input_ids"]
        tokens = [token for ids in encoded for token in (*ids, tokenizer.eos_token_id)]
        starts = range(0, len(tokens) - block_size + 1, block_size)
        blocks = [tokens[start : start + block_size] for start in starts]
        return {"input_ids": blocks, "labels": blocks}

    blocks = documents.map(
        to_blocks, batched=True, remove_columns=documents["train"].column_names, desc=f"Packing blocks of {block_size}"
    )
    for split, rows in blocks.items():
        if len(rows) == 0:
            raise SystemExit(f"the split {split!r} has less than one block of {block_size} tokens; lower --block_size")
    return blocks


def main() -> None:
    """Trains, evaluates, and saves the model, its tokenizer and the log."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    args, training_args = parser.parse_args_into_dataclasses()
    if "wandb" in training_args.report_to and not os.environ.get("WANDB_API_KEY"):
        # Without a key W&B would ask for one; `wandb sync` uploads an offline run later.
        os.environ.setdefault("WANDB_MODE", "offline")
    set_seed(training_args.seed)

    with training_args.main_process_first():
        documents = load_documents(args, training_args.seed)
    model, tokenizer = build_model(args, documents["train"])
    with training_args.main_process_first():
        blocks = pack(documents, tokenizer, args.text_column, args.block_size)
    eval_blocks = blocks["test"]
    if args.max_eval_blocks is not None:
        eval_blocks = eval_blocks.select(range(min(args.max_eval_blocks, len(eval_blocks))))

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"],
        eval_dataset=eval_blocks,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    if trainer.is_world_process_zero():
        print(
            f"{model.num_parameters() / 1e6:,.1f}M parameters; {args.block_size} tokens a block; "
            f"{len(blocks['train']):,} blocks to train on, {len(eval_blocks):,} held out"
        )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.log_metrics("train", result.metrics)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(f"model, tokenizer and trainer_state.json: {training_args.output_dir}")


if __name__ == "__main__":
    main()

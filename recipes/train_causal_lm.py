"""Trains a causal language model with the stock `transformers.Trainer`: from a preset on text that every Python has,
or from `--model_name_or_path` on a data set or file of yours. How it is launched decides where the weights live.

    accelerate launch --config recipes/megatrain.yaml recipes/train_causal_lm.py --output_dir outputs/run --bf16
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from accelerate import init_empty_weights
from datasets import Dataset, DatasetDict, load_dataset
from torch import nn
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

PLAIN_BYTES = 16
"""GPU memory of a parameter in plain training: weight, gradient and AdamW's two moments, fp32."""
HOST_BYTES, HOST_RESERVE = 15, 4 * 2**30
"""Host memory that auto leaves for a parameter, and for everything else."""


def _shape(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": True,
    }


MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _shape(2048, 320, 1024, 4, 5, 5),
    "1b": _shape(16384, 2048, 6144, 24, 16, 4),
    "3b": _shape(16384, 2048, 11008, 36, 16, 2),
    "7b": _shape(16384, 3584, 18944, 28, 28, 4),
    "14b": _shape(16384, 5120, 13824, 48, 40, 8),
}
"""From the smallest to the largest; those from 3b on have layers of Qwen2.5's shapes."""


@dataclass
class ScriptArguments:
    """Which model, which text."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "A saved model; without it, a new one."})
    model_size: Literal["auto", "tiny", "1b", "3b", "7b", "14b"] = field(
        default="auto",
        metadata={
            "help": "Shape of a new model; auto is the smallest that plain training has no room for on the GPU, as far "
            "as host memory allows, and tiny without a GPU."
        },
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


def free_host_bytes() -> int:
    """Host memory that this process may still take: of the machine, and of its control group."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return free


def parameter_count(size: str) -> int:
    """Of a preset."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Qwen2Config(**MODEL_PRESETS[size])).num_parameters()


def automatic_size(gpu_bytes: int, host_bytes: int) -> str:
    """The smallest model that plain training has no room for on the GPU, or the largest that the host has room for; `tiny`
    without a GPU."""
    chosen = "tiny"
    for size in MODEL_PRESETS:
        count = parameter_count(size)
        if PLAIN_BYTES * parameter_count(chosen) > gpu_bytes or HOST_BYTES * count + HOST_RESERVE > host_bytes:
            break
        chosen = size
    return chosen


def random_model(config: Qwen2Config, device: str) -> PreTrainedModel:
    """A new bf16 model in host memory. Its values are drawn on `device`, which on a GPU takes seconds instead of minutes, one
    module at a time, so that the model needn't fit there."""
    with init_empty_weights(include_buffers=False):  # parameters without memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in reversed(list(model.modules())):  # a module comes after those inside it
        for name, empty in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(torch.empty_like(empty, device=device)))
        model._init_weights(module)
        module.cpu()
    model.tie_weights()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def build_model(args: ScriptArguments, train_documents: Dataset) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The saved model that was asked for, or a new one with a byte-level BPE tokenizer made from the text."""
    if args.model_name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
        return model, AutoTokenizer.from_pretrained(args.model_name_or_path)
    size = args.model_size
    if size == "auto":
        gpu_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
        size = automatic_size(gpu_bytes, free_host_bytes())
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
    if size != "tiny" and torch.cuda.is_available():
        return random_model(config, "cuda"), tokenizer
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
    result.metrics["parameters"] = model.num_parameters()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(f"model, tokenizer and trainer_state.json: {training_args.output_dir}")


if __name__ == "__main__":
    main()

"""Measures a causal language model on texts, by the stock `transformers.Trainer`; nothing is trained.

    accelerate launch --config recipes/megatrain.yaml recipes/evaluate.py --model_name_or_path MODEL --dataset_name DATA \
        --output_dir OUT --bf16 --per_device_eval_batch_size 8

When: you want the loss and the perplexity of a model that doesn't fit the GPU: to compare checkpoints, to choose a base, to
check a quantised copy against its original. Layers stream once a batch, so take the largest batch that the activations allow.
Memory: 2 bytes of host memory a parameter, as no masters, moments or gradients are made; on the GPU the slots and one batch.
DATA: a data set of the Hub, or a folder with test.jsonl; a row is {"text": ...}.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class ScriptArguments:
    """Which model, which texts."""

    model_name_or_path: str = field(metadata={"help": "A saved model, of the Hub or a local folder."})
    dataset_name: str = field(metadata={"help": "A data set of the Hub, or a local folder."})
    dataset_split: str = field(default="test", metadata={"help": "The part of it that is read."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    block_size: int = field(default=4096, metadata={"help": "Tokens in a block, within which a token sees those before it."})


def main() -> None:
    """Prints and saves the loss and the perplexity of a token."""
    args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    data = load_dataset(args.dataset_name, split=args.dataset_split)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype="auto")
    model.requires_grad_(False)

    def to_blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # Blocks of one length: the Trainer's mean over batches is then the mean over tokens.
        tokens = [token for ids in tokenizer(rows[args.text_column])["input_ids"] for token in ids]
        starts = range(0, len(tokens) - args.block_size + 1, args.block_size)
        blocks = [tokens[start : start + args.block_size] for start in starts]
        return {"input_ids": blocks, "labels": blocks}

    blocks = data.map(to_blocks, batched=True, remove_columns=data.column_names)
    if len(blocks) == 0:
        raise SystemExit(f"the texts have less than one block of {args.block_size} tokens; lower --block_size")
    training_args.prediction_loss_only = True
    trainer = Trainer(model=model, args=training_args, eval_dataset=blocks, data_collator=default_data_collator)
    metrics = trainer.evaluate()
    metrics["eval_perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()

"""Classifies texts with an encoder, by the stock `transformers.Trainer`: all weights are trained, then the test split's
accuracy is measured.

    accelerate launch --config recipes/megatrain.yaml recipes/classify.py --model_name_or_path MODEL --dataset_name DATA \
        --output_dir OUT --bf16 --per_device_train_batch_size 64 --learning_rate 1e-5 --num_train_epochs 3

When: each text has one of a few labels, and you want one number or class for it, not prose. An encoder of some hundred million
to ten billion parameters is then better and far cheaper than a chat model. `--do_train false` measures a trained one.
Memory: 14 bytes of host memory a parameter. A small encoder fits the GPU whole, where the plan then puts it.
DATA: a data set of the Hub, or a folder with train.jsonl and test.jsonl (or csv); a row is {"text": ..., "label": ...}.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    """Which model, which texts."""

    model_name_or_path: str = field(metadata={"help": "A saved encoder, of the Hub or a local folder."})
    dataset_name: str = field(metadata={"help": "A data set of the Hub, or a local folder."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    label_column: str = field(default="label", metadata={"help": "The column that holds the label: a number or a word."})
    max_length: int = field(default=512, metadata={"help": "Tokens after which a text is cut off."})


@dataclass
class Arguments(TrainingArguments):
    """The Trainer's, which train unless told otherwise."""

    do_train: bool = field(default=True, metadata={"help": "Whether to train before the test split is measured."})


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of texts whose likeliest label is the right one."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((np.argmax(logits, axis=-1) == prediction.label_ids).mean())}


def main() -> None:
    """Trains, evaluates, and saves the model and its tokenizer."""
    args, training_args = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    data = load_dataset(args.dataset_name)
    labels = sorted(set(data["train"][args.label_column]))
    numbers = {label: number for number, label in enumerate(labels)}
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model_name_or_path,
        num_labels=len(labels),
        id2label={number: str(label) for label, number in numbers.items()},
        label2id={str(label): number for label, number in numbers.items()},
    )

    def encode(rows: dict[str, list]) -> dict[str, list]:
        encoded = tokenizer(rows[args.text_column], truncation=True, max_length=args.max_length)
        return {**encoded, "labels": [numbers[label] for label in rows[args.label_column]]}

    with training_args.main_process_first():
        encoded = data.map(encode, batched=True, remove_columns=data["train"].column_names)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=encoded["train"],
        eval_dataset=encoded["test"],
        processing_class=tokenizer,  # pads each batch to its longest text
        compute_metrics=accuracy,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.log_metrics("train", result.metrics)
        trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()


if __name__ == "__main__":
    main()

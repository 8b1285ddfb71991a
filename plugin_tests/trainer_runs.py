"""Runs of the stock Trainer and of bare Accelerate, with and without the plugin, for tests that compare the two."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from flat_settings import nested
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from versions import older

import megatrain_accelerate
from megatrain_accelerate.engine import engine_of

Record = dict[str, Any]
VOCABULARY = 128
TOLERANCE = 1e-5 if older("torch", "2.6") else 1e-6
"""fp32 on the CPU runs the same kernels in both; what differs is the rounding inside AdamW, in torch 2.5 more of it."""

# Transformers 4 logs losses with four decimals.
_LOSS_TOLERANCE = 1.01e-4 if "round(tr_loss" in inspect.getsource(Trainer._maybe_log_save_evaluate) else 0.0

# Timings and what the engine adds aren't comparable.
_VOLATILE = (
    *("runtime", "step_time", "per_second", "total_flos", "megatrain/"),
    *("jit_compilation", "preparation_time", "memory", "_mem_"),
)


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A randomly initialised tiny Llama in fp32.

    Not Qwen2: the true gradient of its key biases is zero (softmax doesn't see them), and Adam turns the rounding
    errors that are left of it into whole steps.
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


@contextlib.contextmanager
def plugin(active: bool = True, **settings: Any) -> Iterator[None]:
    """The plugin is on while the body runs, if ``active``."""
    # Transformers 4 tells Accelerate by environment, for good.
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if active:
        megatrain_accelerate.enable(nested(settings))
    try:
        yield
    finally:
        megatrain_accelerate.disable()
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def examples(count: int = 12, length: int = 16, seed: int = 5, vocabulary: int = VOCABULARY) -> list[Record]:
    """Random texts of one length, all tokens labelled."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, vocabulary, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def ragged_examples(count: int = 12, seed: int = 5, vocabulary: int = VOCABULARY) -> list[Record]:
    """Random texts of 4 to 20 tokens, with a prompt of a random length that isn't labelled."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for _ in range(count):
        length, prompt = (int(torch.randint(4, 21, (), generator=generator)) for _ in range(2))
        ids = torch.randint(1, vocabulary, (length,), generator=generator)
        labels = ids.clone()
        labels[: min(prompt // 2, length - 2)] = -100
        records.append({"input_ids": ids, "labels": labels})
    return records


class Padding:
    """A collator that pads with attention masks.

    Args:
        side: ``left`` or ``right``.
    """

    def __init__(self, side: str) -> None:
        self.side = side

    def __call__(self, records: Sequence[Record]) -> Record:
        longest = max(len(record["input_ids"]) for record in records)

        def pad(row: torch.Tensor, value: int) -> torch.Tensor:
            filler = row.new_full((longest - len(row),), value)
            return torch.cat([filler, row] if self.side == "left" else [row, filler])

        return {
            "input_ids": torch.stack([pad(r["input_ids"], 0) for r in records]),
            "attention_mask": torch.stack([pad(torch.ones_like(r["input_ids"]), 0) for r in records]),
            "labels": torch.stack([pad(r["labels"], -100) for r in records]),
        }


@dataclasses.dataclass
class TrainerRun:
    """What a Trainer's run left behind."""

    trainer: Trainer
    initial: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    @property
    def history(self) -> list[Record]:
        """The log, without what differs from run to run."""
        return [
            {key: value for key, value in entry.items() if not any(part in key for part in _VOLATILE)}
            for entry in self.trainer.state.log_history
        ]

    def logged(self, key: str) -> list[Any]:
        """All values of one key."""
        return [entry[key] for entry in self.history if key in entry]

    @property
    def moved(self) -> set[str]:
        """Names of the weights that training changed."""
        return {name for name, weight in self.weights.items() if not torch.equal(weight, self.initial[name])}


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights, read as Python sees them."""
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def short_run(folder: Path) -> dict[str, Any]:
    """Training arguments of a short run on the CPU that logs every step."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "seed": 3,
    }


def make_arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Those of :func:`short_run` with ``changes``."""
    return TrainingArguments(**{**short_run(folder), **changes})


def run_trainer(
    make_model: Callable[[], nn.Module],
    folder: Path,
    *,
    streamed: bool,
    dataset: Sequence[Record] | None = None,
    script: Callable[[Trainer], Any] | None = None,
    options: Callable[[nn.Module], Record] | None = None,
    settings: Record | None = None,
    trainer_class: type[Trainer] = Trainer,
    **arguments: Any,
) -> TrainerRun:
    """Trains as a user's script would.

    Args:
        make_model: called once.
        folder: the output directory.
        streamed: with the plugin.
        dataset: the training set.
        script: what is done with the Trainer instead of ``train()``.
        options: further keyword arguments of the Trainer, made for the model.
        settings: the plugin's.
        trainer_class: Trainer or a subclass.
        arguments: changes to :func:`make_arguments`.
    """
    with plugin(streamed, **(settings or {})):
        model = make_model()
        initial = snapshot(model)
        trainer = trainer_class(
            **{
                "model": model,
                "args": make_arguments(folder, **arguments),
                "train_dataset": examples() if dataset is None else dataset,
                **(options(model) if options is not None else {}),
            }
        )
        script(trainer) if script is not None else trainer.train()
        engine = engine_of(trainer.model)
        assert (engine is not None) == streamed, "the run must be streamed if and only if the plugin is on"
        if engine is not None:
            on_device = all(layer.unit.is_on_device for layer in engine.runtime.layers)
            assert on_device or engine.runtime.meter.counters.weight_fetches > 0
        return TrainerRun(trainer, initial, snapshot(trainer.model))


def run_both(make_model: Callable[[], nn.Module], folder: Path, **changes: Any) -> tuple[TrainerRun, TrainerRun]:
    """(stock, streamed) runs of the same script, compared."""
    stock = run_trainer(make_model, folder / "stock", streamed=False, **changes)
    streamed = run_trainer(make_model, folder / "streamed", streamed=True, **changes)
    assert_same_run(streamed, stock)
    return stock, streamed


def assert_same_run(streamed: TrainerRun, stock: TrainerRun, tolerance: float = TOLERANCE) -> None:
    """Same log, same weights; and the stock run did train."""
    assert stock.moved, "nothing was trained"
    assert len(streamed.history) == len(stock.history)
    for ours, theirs in zip(streamed.history, stock.history, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            allowed = max(tolerance, _LOSS_TOLERANCE) if key == "loss" else tolerance
            assert close(ours[key], value, allowed), f"{key} at step {theirs['step']}: {ours[key]} and not {value}"
    assert_same_weights(streamed.weights, stock.weights, tolerance)
    assert streamed.moved == stock.moved


def close(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> bool:
    """Equality of numbers, to the tolerance."""
    return abs(float(ours) - float(theirs)) <= tolerance * max(1.0, abs(float(theirs)))


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    """The same names, and the same values to the tolerance."""
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        difference = float((ours[name] - weight).abs().max())
        assert difference <= tolerance, f"{name}: weights differ by {difference}"

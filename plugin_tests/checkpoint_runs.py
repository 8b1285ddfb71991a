"""Trainers that save checkpoints, and what is in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from trainer_runs import examples, make_arguments
from transformers import Trainer

CHECKPOINT_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
}


def make_trainer(model: nn.Module, folder: Path, **changes: Any) -> Trainer:
    """A Trainer that saves every step and evaluates on the texts that it trains on."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, **changes}
    return Trainer(model, make_arguments(folder, **settings), train_dataset=examples(), eval_dataset=examples(4, seed=8))

"""Uploads of checkpoints, which go on in the background: they must read folders that stay where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_torch import token_batches
from trainer_runs import plugin, tiny_llama
from transformers import Trainer, TrainingArguments


def test_uploads_read_the_published_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[str] = []

    def push(self: Trainer, checkpoint_folder: str) -> None:
        assert (Path(checkpoint_folder) / "optimizer.pt").exists()
        uploaded.append(checkpoint_folder)

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    data = [{"input_ids": ids[0], "labels": ids[0]} for ids in token_batches(4)]
    with plugin():
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, save_steps=1, push_to_hub=True, report_to="none", use_cpu=True, disable_tqdm=True
        )
        Trainer(tiny_llama(), arguments, train_dataset=data).train()
    assert uploaded == [str(tmp_path / "checkpoint-1"), str(tmp_path / "checkpoint-2")]
    assert torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False).push_to_hub

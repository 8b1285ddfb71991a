"""Models on the meta device under the stock Trainer: trained from scratch, saved, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from trainer_runs import examples, make_arguments, plugin, snapshot, tiny_llama
from transformers import Trainer
from versions import older

pytestmark = pytest.mark.skipif(older("transformers", "5.0"), reason="its rules leave out norms: refused by name")


def empty_llama() -> Any:
    with init_empty_weights():
        return tiny_llama()


def trainer_of(folder: Path, **arguments: Any) -> Trainer:
    return Trainer(model=empty_llama(), args=make_arguments(folder, **arguments), train_dataset=examples())


def test_a_model_without_weights_is_trained_and_resumed_with_the_same_bits(tmp_path: Path) -> None:
    with plugin():
        trainer = trainer_of(tmp_path / "whole", save_strategy="steps", save_steps=2)
        trainer.train()
        whole = snapshot(trainer.model)
        assert all(weight.isfinite().all() for weight in whole.values())
    with plugin():
        resumed = trainer_of(tmp_path / "resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        for name, weight in snapshot(resumed.model).items():
            assert torch.equal(weight, whole[name]), name


def test_the_trainers_seed_decides_the_weights(tmp_path: Path) -> None:
    drawn = []
    for seed in (1, 1, 2):
        with plugin():
            trainer = trainer_of(tmp_path, seed=seed, learning_rate=0.0, weight_decay=0.0)
            trainer.train()
            drawn.append(snapshot(trainer.model))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])


def test_a_saved_model_has_all_its_weights(tmp_path: Path) -> None:
    with plugin():
        trainer = trainer_of(tmp_path / "run")
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        expected = snapshot(trainer.model)
    loaded = type(trainer.model).from_pretrained(tmp_path / "saved")
    for name, parameter in loaded.named_parameters():
        assert not parameter.is_meta
        assert float((parameter.detach() - expected[name]).abs().max()) == pytest.approx(0.0, abs=1e-6)

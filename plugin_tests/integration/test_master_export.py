"""The fp32 export: all bits of the masters, read by plain transformers, complete or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import attach, masters_of
from plain_torch import tiny_model, token_batches
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import megatrain_accelerate
from megatrain_accelerate.checkpoint import checkpoints
from megatrain_accelerate.errors import ConfigError, UnsupportedError
from megatrain_accelerate.units import GIB

pytestmark = pytest.mark.usefixtures("profiled_once")

SMALL_SHARDS = 40_000 / GIB


def stepped(trainings: Any, **settings: Any) -> Any:
    training = trainings(**settings)
    for ids in token_batches(2):
        training.step(ids)
    return training


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("shard_gib", [4.0, SMALL_SHARDS])
def test_exported_weights_are_the_masters_bit_by_bit(trainings: Any, bf16: bool, shard_gib: float, tmp_path: Path) -> None:
    training = stepped(trainings, bf16=bf16)
    files = megatrain_accelerate.export_masters(training.model, tmp_path / "fp32", shard_gib)
    assert (len(files) == 1) == (shard_gib == 4.0)
    masters = masters_of(training.engine, training.model)
    written = {name: value for file in files for name, value in load_file(file).items()}
    assert written.keys() == masters.keys()
    for name, master in masters.items():
        assert written[name].dtype == torch.float32
        assert torch.equal(written[name], master), name
    assert any(not torch.equal(value, value.bfloat16().float()) for value in written.values())
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, masters[name]), name


def test_a_tied_weight_is_written_once_and_a_shard_is_no_larger_than_asked(tmp_path: Path) -> None:
    engine = attach(model := tiny_model(tie_word_embeddings=True))
    files = megatrain_accelerate.export_masters(model, tmp_path / "fp32", SMALL_SHARDS)
    index = json.loads((tmp_path / "fp32" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert index["metadata"]["total_size"] == 4 * sum(parameter.numel() for parameter in model.parameters())
    shards = [load_file(file) for file in files]
    assert all(len(shard) == 1 or sum(4 * value.numel() for value in shard.values()) <= 40_000 for shard in shards)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32")
    assert torch.equal(loaded.lm_head.weight, engine_weight(engine, model))
    engine.close()


def engine_weight(engine: Any, model: torch.nn.Module) -> torch.Tensor:
    return masters_of(engine, model)["model.embed_tokens.weight"]


def test_a_buffer_that_is_a_view_of_another_layout_is_exported(tmp_path: Path) -> None:
    model = tiny_model()
    model.register_buffer("mask", torch.arange(12.0).view(3, 4).t())
    engine = attach(model)
    (file,) = megatrain_accelerate.export_masters(model, tmp_path / "fp32")
    assert torch.equal(load_file(file)["mask"], model.mask)
    engine.close()


def test_a_full_disk_leaves_nothing_behind_and_the_model_usable(
    trainings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = stepped(trainings)
    written: list[Path] = []

    def fill(values: Any, file: Path, **options: Any) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(file)
        save_file(values, file, **options)

    monkeypatch.setattr(checkpoints, "save_file", fill)
    with pytest.raises(OSError, match="No space left"):
        megatrain_accelerate.export_masters(training.model, tmp_path / "fp32", SMALL_SHARDS)
    assert list(tmp_path.iterdir()) == []
    training.step(token_batches(1)[0])
    monkeypatch.undo()
    assert len(megatrain_accelerate.export_masters(training.model, tmp_path / "fp32", SMALL_SHARDS)) > 1


def test_what_cannot_be_exported_is_refused(trainings: Any, tmp_path: Path) -> None:
    training = stepped(trainings)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="isn't an empty folder"):
        megatrain_accelerate.export_masters(training.model, tmp_path)
    with pytest.raises(ConfigError, match="must be above 0"):
        megatrain_accelerate.export_masters(training.model, tmp_path / "new", 0)
    with pytest.raises(UnsupportedError, match=r"needs a prepared model.*save_pretrained\(\)"):
        megatrain_accelerate.export_masters(tiny_model(), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

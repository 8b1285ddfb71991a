"""Weights saved in shards: the values of the masters' owner, and no second copy of the model while they are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_runs import prepared, train
from process_memory import PeakMemory
from safetensors import safe_open
from torch import nn
from trainer_runs import VOCABULARY, plugin, tiny_llama
from transformers import LlamaForCausalLM

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.units import MIB

pytestmark = pytest.mark.usefixtures("profiled_once")

SHARD = "8MB"
IDS = torch.randint(0, VOCABULARY, (1, 4), generator=torch.Generator().manual_seed(0))
SAVES: dict[str, Callable[[Accelerator, Any, Path], None]] = {
    "accelerate": lambda accelerator, model, folder: accelerator.save_model(model, folder, max_shard_size=SHARD),
    "transformers": lambda _, model, folder: model.save_pretrained(folder, max_shard_size=SHARD),
    "loop": lambda accelerator, model, folder: accelerator.unwrap_model(model).save_pretrained(
        folder, max_shard_size=SHARD, state_dict=accelerator.get_state_dict(model), save_function=accelerator.save
    ),
}


def medium_llama() -> nn.Module:
    """50 MiB of fp32."""
    return tiny_llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=6)


@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("no", marks=pytest.mark.long)])
def test_shards_hold_the_trained_weights_and_are_written_one_by_one(way: str, precision: str, tmp_path: Path) -> None:
    with plugin():
        accelerator = Accelerator(mixed_precision=precision, cpu=True)
        model, optimizer = prepared(accelerator, medium_llama)
        train(accelerator, model, optimizer, [IDS])
        SAVES[way](accelerator, model, tmp_path / "warm")
        optimizer.zero_grad()
        train(accelerator, model, optimizer, [IDS])
        with PeakMemory() as memory:
            SAVES[way](accelerator, model, tmp_path / "saved")
        trained = {name: weight.clone() for name, weight in model.state_dict().items()}
        engine = engine_of(model)
        assert engine is not None
        engine.close()
    shards = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(shards) >= 3
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    saved = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            saved.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping
    assert saved.keys() == index["weight_map"].keys()
    assert all(torch.equal(saved[name], trained[name]) for name in saved)
    # Half of the model in bf16, a quarter in fp32: buffers of files, Python's own objects.
    assert memory.growth < 12 * MIB
    if way != "accelerate":  # which saves no config
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
        assert all(torch.equal(loaded[name], weight) for name, weight in trained.items())

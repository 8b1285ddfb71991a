"""The fp32 masters of a prepared model as a folder that transformers loads: safetensors, one shard in memory at a time."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from megatrain_accelerate.disk import require_free_bytes, staging_folder
from megatrain_accelerate.engine import Engine
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.units import GIB

_INDEX = "model.safetensors.index.json"


def write_masters(model: nn.Module, engine: Engine, folder: Path, max_shard_gib: float) -> list[Path]:
    """Writes all weights in fp32, trained ones with all bits of their masters, and the model's configuration.

    Parameters are read from the store one by one, so that the host holds one shard more at the most. Ties are written once,
    under the name that comes first, as ``save_pretrained`` does. The folder appears when it is complete.

    Args:
        model: a prepared model.
        engine: its engine.
        folder: where to; must not exist, or be empty.
        max_shard_gib: size of one file; a larger parameter gets a file of its own.

    Returns:
        The shards' paths, in the order of the model.

    Raises:
        ConfigError: the folder holds something, or the size isn't above 0.
        DiskError: the disk is full, or can't be written to; nothing is left behind.
    """
    if max_shard_gib <= 0:
        raise ConfigError(f"max_shard_gib must be above 0, got {max_shard_gib}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and isn't an empty folder; name another one for the fp32 weights")
    engine.drain()
    what, remedy = "the fp32 export", "Free some space, or name a folder on another disk."
    with staging_folder(folder.parent, f".{folder.name}.incomplete", what, remedy) as staging:
        weights = sum(_fp32_bytes(tensor) for _, tensor in saved_tensors(model))
        require_free_bytes(folder.parent, {"weights": weights}, what, remedy)
        complete = staging / folder.name
        complete.mkdir()
        names = _write(model, engine, complete, int(max_shard_gib * GIB))
        if folder.exists():
            folder.rmdir()
        os.rename(complete, folder)
    return [folder / name for name in names]


def _write(model: nn.Module, engine: Engine, folder: Path, max_shard_bytes: int) -> list[str]:
    homes = {id(state.parameter): (unit, state) for unit in engine.runtime.units for state in unit.states}
    shards = _shards(model, max_shard_bytes)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        values = {}
        for name, tensor in shard.items():
            if id(tensor) in homes:
                unit, state = homes[id(tensor)]
                values[name] = unit.read_master(state)
            else:
                kept = torch.float32 if tensor.is_floating_point() else tensor.dtype
                values[name] = tensor.detach().to("cpu", kept, copy=True)
        save_file(values, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(_fp32_bytes(tensor) for shard in shards for tensor in shard.values())
        (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", torch.float32)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    return names


def _fp32_bytes(tensor: torch.Tensor) -> int:
    return (4 if tensor.is_floating_point() else tensor.element_size()) * tensor.numel()


def _shards(model: nn.Module, max_shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    """What each file is to hold, in the order of the model."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    held = 0
    for name, tensor in saved_tensors(model):
        size = _fp32_bytes(tensor)
        if held and held + size > max_shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += size
    return shards


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters once each, then the buffers that are saved."""
    yield from model.named_parameters()
    for owner, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{owner}.{name}" if owner else name, buffer

"""The functions for scripts: switch the plugin on and off, wait for steps that are under way, export fp32 weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain_accelerate import activation
from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError, UnsupportedError
from megatrain_accelerate.integrations import import_hook
from megatrain_accelerate.integrations.wrapping import require_patches

if TYPE_CHECKING:
    from torch import nn


def enable(config: MegatrainConfig | Mapping[str, Any] | str | None = None, **settings: Any) -> MegatrainConfig:
    """Switches the plugin on for this process, as the launcher's ``--megatrain`` does. Works at any time before ``prepare``.

    Args:
        config: the settings as a ``MegatrainConfig``, a mapping, JSON or the path of a yaml file; the defaults if left out.
        settings: single settings, instead of ``config``.

    Returns:
        The settings in force.

    Raises:
        ConfigError: a setting is unknown or malformed, both kinds of arguments are given, or ``MEGATRAIN_DISABLE`` is set.
        PatchError: Accelerate or Transformers isn't what the integration was written for.
    """
    if config is not None and settings:
        raise ConfigError(f"enable() takes a config or single settings, not both; got {config!r} and {settings!r}")
    failure = getattr(sys.modules.get("_megatrain_autoload"), "failure", None)
    if failure is not None:
        raise failure
    import_hook.install()
    require_patches()
    return activation.activate(settings or config)


def disable() -> None:
    """Switches the plugin off for models prepared from now on. Prepared models keep streaming."""
    activation.deactivate()


def drain(model: nn.Module | None = None) -> None:
    """Blocks until every optimizer step that was taken is applied to the weights that Python sees.

    Only needed by code that reads or writes through tensors that it took out of parameters earlier: touching a parameter after
    a step waits by itself, and so do state dicts, saves and evaluation.

    Args:
        model: a prepared model, or a part of one; all prepared models if None.

    Raises:
        UnsupportedError: the model isn't prepared.
        StepWorkerError: a step failed.
    """
    from megatrain_accelerate.engine import all_engines
    from megatrain_accelerate.integrations.shared_parts import engines_with

    engines = all_engines() if model is None else engines_with(model)
    if model is not None and not engines:
        raise UnsupportedError("drain() needs what accelerator.prepare() returned with megatrain active, or no argument")
    for engine in engines:
        engine.runtime.bring_states()


def export_masters(model: nn.Module, folder: str | os.PathLike[str], max_shard_gib: float = 4.0) -> list[Path]:
    """Writes the fp32 masters of a prepared model's weights, with all their bits, as a folder for ``from_pretrained``.

    ``save_model`` and ``save_pretrained`` write the weights in the dtype in which the model computes, usually bf16.

    Args:
        model: a prepared model.
        folder: the folder to write, which must be missing or empty. It appears when it is complete.
        max_shard_gib: largest size of a file, and of the host memory taken on top; a larger parameter gets its own file.

    Returns:
        The files with weights.

    Raises:
        UnsupportedError: the model isn't prepared.
        ConfigError: the folder isn't empty, or the size isn't above 0.
        StepWorkerError: a step failed.
        DiskError: the disk is full, or can't be written to; nothing is left behind.
    """
    from megatrain_accelerate.checkpoint.checkpoints import write_masters
    from megatrain_accelerate.engine import engine_of

    engine = engine_of(model)
    if engine is None:
        raise UnsupportedError("export_masters() needs a prepared model; save one that isn't streamed with save_pretrained()")
    return write_masters(model, engine, Path(folder), max_shard_gib)

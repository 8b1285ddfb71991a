"""Compares the size of the Trainer's next checkpoint with the free space on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from megatrain_accelerate.checkpointing import SPACE_REMEDY, checkpoint_staging
from megatrain_accelerate.disk import require_free_bytes
from megatrain_accelerate.engine import Engine
from megatrain_accelerate.master_export import saved_tensors
from megatrain_accelerate.optim.moment_states import saved_bytes, views_of


def checkpoint_bytes(model: nn.Module, optimizer: Any, engine: Engine, save_only_model: bool) -> dict[str, int]:
    """Bytes of the tensors that the Trainer will write into the next checkpoint, by what they are.

    Weights are counted in the dtype that they are saved in, with PEFT's adapters only the trained ones. AdamW's state is
    what it will be after its first step; another optimizer's is what it is now.

    Args:
        model: the prepared model.
        optimizer: the Trainer's, or None.
        engine: the model's.
        save_only_model: whether the optimizer's state stays out.
    """
    adapters_only = bool(getattr(model, "peft_config", None))
    weights = sum(
        tensor.numel() * tensor.element_size()
        for _, tensor in saved_tensors(model)
        if tensor.requires_grad or not adapters_only
    )
    if save_only_model or optimizer is None:
        return {"weights": weights}
    entries = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = engine.runtime.state_of(parameter)
        views = {} if state is None or not state.entry.spec.trainable else views_of(state)
        entries[parameter] = {**optimizer.state.get(parameter, {}), **views}
    return {"weights": weights, "optimizer": saved_bytes(entries, engine.config.host_memory_gib)}


def require_room_for_a_checkpoint(run_dir: Path, model: nn.Module, optimizer: Any, engine: Engine, args: Any) -> int:
    """Checks that the disk has room for one more checkpoint.

    Args:
        run_dir: the folder of the checkpoints.
        model: the prepared model.
        optimizer: the Trainer's, or None.
        engine: the model's.
        args: the Trainer's arguments.

    Returns:
        The bytes that it will take.

    Raises:
        DiskError: with what is needed, what is free, and where.
    """
    parts = checkpoint_bytes(model, optimizer, engine, args.save_only_model)
    require_free_bytes(run_dir, parts, "a checkpoint", SPACE_REMEDY)
    return sum(parts.values())


def require_saving_possible(args: Any, model: nn.Module, optimizer: Any, engine: Engine) -> None:
    """Checks that the first checkpoint can be saved, if any will be. Removes what killed runs left in the output folder.

    Raises:
        DiskError: the output folder can't be written to, or the disk has no room.
    """
    if not args.should_save or getattr(args.save_strategy, "value", args.save_strategy) == "no":
        return
    run_dir = Path(args.output_dir)
    with checkpoint_staging(run_dir):
        require_room_for_a_checkpoint(run_dir, model, optimizer, engine, args)

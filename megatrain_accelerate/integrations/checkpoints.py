"""The Trainer's checkpoints: complete or absent, no larger than what the disk has free, and mapped where they are resumed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.checkpointing import (
    SPACE_REMEDY,
    TRAINER_STATE,
    checkpoint_staging,
    publish,
    rotate,
    saving_progress,
)
from megatrain_accelerate.disk import require_free_bytes
from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.master_export import saved_tensors
from megatrain_accelerate.optim.moment_states import saved_bytes, views_of


def save_checkpoint(
    original: Callable[..., Any], trainer: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
) -> None:
    """Writes a checkpoint aside and renames it when it is complete, so that a kill never leaves a broken one."""
    engine = engine_of(trainer.model)
    if engine is None or not trainer.args.should_save:
        original(trainer, model, trial, *args, **kwargs)
        return
    run_dir = Path(trainer._get_output_dir(trial=trial))
    engine.drain()
    with checkpoint_staging(run_dir, f"checkpoint-{trainer.state.global_step}") as staging:
        expected = require_room_for_a_checkpoint(run_dir, trainer.model, trainer.optimizer, engine, trainer.args)
        with (
            saving_progress(staging, expected, show=not trainer.args.disable_tqdm),
            _saving_to(trainer, staging),
            _logged_without(staging.name),
        ):
            original(trainer, model, trial, *args, **kwargs)
        _point_best_checkpoint(trainer, staging, run_dir)
        published = publish(staging)
    _rotate(trainer, run_dir)
    if trainer.args.push_to_hub:  # which reads the output folder, too: nothing lies aside there now
        for folder in published:
            trainer._push_from_checkpoint(str(folder))


@contextlib.contextmanager
def _saving_to(trainer: Any, folder: Path) -> Iterator[None]:
    """The Trainer writes its checkpoint below ``folder``, and doesn't upload it from there: uploads outlive the save."""
    trainer._get_output_dir = lambda trial: str(folder)
    trainer._push_from_checkpoint = lambda checkpoint_folder: None
    try:
        yield
    finally:
        del trainer._get_output_dir, trainer._push_from_checkpoint


@contextlib.contextmanager
def _logged_without(folder: str) -> Iterator[None]:
    """Log messages of the body name a checkpoint by the path that it will have, and not by the one below ``folder``."""
    make = logging.getLogRecordFactory()

    def renamed(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with contextlib.suppress(TypeError, ValueError):  # a message that doesn't fit its arguments is logging's to report
            if folder in (message := record.getMessage()):
                record.msg, record.args = message.replace(f"{folder}/", ""), ()
        return record

    logging.setLogRecordFactory(renamed)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def _point_best_checkpoint(trainer: Any, staging: Path, run_dir: Path) -> None:
    """The Trainer notes the best checkpoint by the path under which it saw it."""
    best_step = getattr(trainer.state, "best_global_step", None)
    best = Path(trainer.state.best_model_checkpoint) if trainer.state.best_model_checkpoint else None
    if best is not None and best.parent == staging:
        trainer.state.best_model_checkpoint = str(run_dir / best.name)
    elif best_step and (run_dir / f"checkpoint-{best_step}").exists():
        trainer.state.best_model_checkpoint = str(run_dir / f"checkpoint-{best_step}")
    for folder in staging.iterdir():
        if (folder / TRAINER_STATE).exists():
            trainer.state.save_to_json(str(folder / TRAINER_STATE))


def _rotate(trainer: Any, run_dir: Path) -> None:
    """Deletes old checkpoints by the Trainer's own rule; inside the original call they weren't where it looked."""
    if not trainer.args.save_total_limit or trainer.args.save_total_limit <= 0:
        return
    best = trainer.state.best_model_checkpoint

    def delete_by_rule(stand_ins: Path) -> None:
        best_stand_in = str(stand_ins / Path(best).name) if best and Path(best).parent == run_dir else best
        try:
            from transformers.trainer_utils import rotate_checkpoints
        except ImportError:  # transformers 4, which logs what it deletes
            trainer.state.best_model_checkpoint = best_stand_in
            with _logged_without(stand_ins.name):
                trainer._rotate_checkpoints(use_mtime=True, output_dir=str(stand_ins))
            trainer.state.best_model_checkpoint = best
            return
        rotate_checkpoints(
            output_dir=str(stand_ins),
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=best_stand_in,
            use_mtime=True,
        )

    rotate(run_dir, delete_by_rule)


def load_optimizer_and_scheduler(original: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    """Reads the optimizer's state from a file mapping: read whole, it would need 10 bytes a parameter more."""
    if checkpoint is None or engine_of(trainer.model) is None:
        original(trainer, checkpoint)
        return
    with _mapped_files():
        original(trainer, checkpoint)


@contextlib.contextmanager
def _mapped_files() -> Iterator[None]:
    """``torch.load`` maps files while the body runs."""
    try:
        serialization: Any = importlib.import_module("torch.utils.serialization.config")
    except ModuleNotFoundError:  # torch before 2.6
        load = torch.load
        torch.load = functools.partial(load, mmap=True)
        try:
            yield
        finally:
            torch.load = load
        return
    with serialization.patch({"load.mmap": True}):
        yield


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

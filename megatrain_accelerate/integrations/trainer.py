"""What the Trainer's own steps mean while the plugin is active: placement, checkpoints, resume, logs."""

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
from tqdm.auto import tqdm
from transformers import TrainerCallback

from megatrain_accelerate.checkpointing import (
    STAGING_FOLDER,
    TRAINER_STATE,
    publish,
    remove_incomplete,
    rotate,
    saving_progress,
)
from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.integrations.accelerate_backend import begin_training, require_steps_in_backward_possible
from megatrain_accelerate.integrations.telemetry import Telemetry, describe_bound

logger = logging.getLogger(__name__)


def move_model_to_device(original: Callable[..., Any], trainer: Any, model: nn.Module, device: torch.device) -> None:
    """The engine places weights when the model is prepared; until then they stay on the host."""


def save_checkpoint(
    original: Callable[..., Any], trainer: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
) -> None:
    """Writes a checkpoint aside and renames it when it is complete, so that a kill never leaves a broken one."""
    engine = engine_of(trainer.model)
    if engine is None or not trainer.args.should_save:
        original(trainer, model, trial, *args, **kwargs)
        return
    run_dir = Path(trainer._get_output_dir(trial=trial))
    staging = run_dir / STAGING_FOLDER
    remove_incomplete(run_dir)
    staging.mkdir(parents=True)
    units = engine.runtime.units
    expected = sum(count for unit in units for kind, count in unit.bytes_by_kind().items() if "gradient" not in kind)
    engine.drain()
    with saving_progress(staging, expected, show=not trainer.args.disable_tqdm), _saving_to(trainer, staging):
        original(trainer, model, trial, *args, **kwargs)
    _point_best_checkpoint(trainer, staging, run_dir)
    published = publish(run_dir)
    if trainer.args.push_to_hub:
        for folder in published:
            trainer._push_from_checkpoint(str(folder))
    _rotate(trainer, run_dir)


@contextlib.contextmanager
def _saving_to(trainer: Any, folder: Path) -> Iterator[None]:
    """The Trainer writes its checkpoint below ``folder``, and doesn't upload it from there: uploads outlive the save."""
    trainer._get_output_dir = lambda trial: str(folder)
    trainer._push_from_checkpoint = lambda checkpoint_folder: None
    try:
        yield
    finally:
        del trainer._get_output_dir, trainer._push_from_checkpoint


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
        except ImportError:  # transformers 4
            trainer.state.best_model_checkpoint = best_stand_in
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


class MegatrainCallback(TrainerCallback):
    """Follows a training: chooses the step schedule, adds the engine's numbers to the logs, drains at the end."""

    def __init__(self) -> None:
        self._telemetry: Telemetry | None = None
        self._last_word: str | None = None

    def _engine(self, kwargs: dict[str, Any]) -> Engine | None:
        model = kwargs.get("model")
        return engine_of(model) if model is not None else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to count."""
        engine = self._engine(kwargs)
        if engine is not None:
            self._close_telemetry()  # an exception may have ended the training before
            clips = bool(args.max_grad_norm and args.max_grad_norm > 0)
            tries_again = bool(args.auto_find_batch_size)
            require_steps_in_backward_possible(engine.config, args.gradient_accumulation_steps, clips, tries_again)
            engine.expect_accumulation(args.gradient_accumulation_steps)
            begin_training(engine, clips=clips, tries_again=tries_again)
            self._telemetry = Telemetry(engine, kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step's micro-batches begin."""
        if self._telemetry is not None:
            self._telemetry.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is over."""
        if self._telemetry is not None:
            self._telemetry.step_ends()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluation isn't training time."""
        if self._telemetry is not None:
            self._telemetry.pause()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saving isn't training time."""
        if self._telemetry is not None:
            self._telemetry.pause()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Adds the numbers to a training log, for trackers and history; prints what bounds a step when that changes."""
        if self._telemetry is None or logs is None or "loss" not in logs:
            return
        entries = self._telemetry.entries()
        logs.update(entries)
        if state.log_history:
            state.log_history[-1].update(entries)
        if state.is_local_process_zero and self._telemetry.bound_by not in (None, self._last_word):
            # A word among the logs would make MLflow and ClearML warn at each of them, and callbacks that format numbers fail.
            self._last_word = self._telemetry.bound_by
            tqdm.write(f"megatrain: step {state.global_step} {describe_bound(self._telemetry.shares)}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step is applied before anybody reads the weights."""
        engine = self._engine(kwargs)
        if engine is not None:
            engine.drain()
        self._close_telemetry()

    def _close_telemetry(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
            self._telemetry = None

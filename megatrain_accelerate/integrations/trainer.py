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
from transformers import TrainerCallback

from megatrain_accelerate.checkpointing import TRAINER_STATE, checkpoint_staging, publish, rotate, saving_progress
from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.integrations.accelerate_backend import begin_training, require_steps_in_backward_possible
from megatrain_accelerate.integrations.checkpoint_room import require_room_for_a_checkpoint, require_saving_possible
from megatrain_accelerate.integrations.recorded_choices import record_choice, recorded_choice
from megatrain_accelerate.integrations.telemetry import Telemetry, describe_bound, is_training_log
from megatrain_accelerate.integrations.user_code import looks_before_step
from megatrain_accelerate.progress import say

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


class MegatrainCallback(TrainerCallback):
    """Follows a training: chooses the step schedule, adds the engine's numbers to the logs, drains at the end."""

    def __init__(self) -> None:
        self._telemetry: Telemetry | None = None
        self._last_word: str | None = None
        self.trainer: Callable[[], Any] = lambda: None
        """Whose training it follows, if that is alive; set when the Trainer is made."""

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
            engine.device_plan.expect_steps(state.max_steps, recorded_choice(state, "compiles"))
            require_saving_possible(args, kwargs["model"], kwargs.get("optimizer"), engine)
            trainer = self.trainer()
            looks = trainer is None or looks_before_step(trainer)
            begin_training(engine, steps_in_backward=not (clips or tries_again or looks))
            self._telemetry = Telemetry(engine, kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step's micro-batches begin."""
        if self._telemetry is not None:
            self._telemetry.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is over."""
        if (engine := self._engine(kwargs)) is not None:
            record_choice(state, "compiles", engine.runtime.compiled.pays)
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
        """Adds the numbers to a training log, for trackers and history; says what bounds a step where that is news."""
        # What a script logs within a step isn't the Trainer's entry for whole steps.
        if self._telemetry is None or logs is None or self._telemetry.is_within_step or not is_training_log(logs):
            return
        if (engine := self._engine(kwargs)) is not None:
            self._telemetry.follow(engine)
        entries = self._telemetry.entries()
        logs.update(entries)
        if state.log_history:
            state.log_history[-1].update(entries)
        if state.is_local_process_zero and self._telemetry.bound_by not in (None, self._last_word):
            # A word among the logs would make MLflow and ClearML warn at each of them, and callbacks that format numbers fail.
            self._last_word = self._telemetry.bound_by
            say(f"megatrain: step {state.global_step} {describe_bound(self._telemetry.shares)}")

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

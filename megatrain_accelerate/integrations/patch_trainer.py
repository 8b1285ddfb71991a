"""The patches of ``transformers.trainer`` and of model loading; what they mean is in :mod:`.trainer`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatrain_accelerate.integrations import console
from megatrain_accelerate.integrations.patch_accelerate import making_accelerator
from megatrain_accelerate.integrations.wrapping import delegate, find_class, is_active, wrap, wrap_always

logger = logging.getLogger(__name__)


def _arguments_of(trainer: Any) -> Any:
    return trainer.args


def patch_init(module: ModuleType) -> None:
    """A Trainer gets our callback, before those of the trackers, and its model is watched until it is prepared."""
    watch = delegate("early_forward", "watch_model")

    def init(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        if is_active(trainer.args):
            from megatrain_accelerate.integrations.trainer import MegatrainCallback

            callback = MegatrainCallback()
            callback.trainer = weakref.ref(trainer)
            trainer.callback_handler.callbacks.insert(1, callback)  # behind DefaultFlowCallback
            watch(trainer)

    wrap_always(find_class(module, "Trainer"), "__init__", init, needs=("self", "model", "args"))


def patch_create_accelerator(module: ModuleType) -> None:
    """The Trainer's Accelerator knows whose arguments decide."""

    def create(original: Callable[..., None], trainer: Any) -> None:
        with making_accelerator(trainer.args):
            original(trainer)

    wrap_always(find_class(module, "Trainer"), "create_accelerator_and_postprocess", create, needs=("self",))


def patch_move_model_to_device(module: ModuleType) -> None:
    """The Trainer places no model."""
    move = delegate("trainer", "move_model_to_device")
    needs = ("self", "model", "device")
    wrap(find_class(module, "Trainer"), "_move_model_to_device", move, needs, _arguments_of)


def patch_save_checkpoint(module: ModuleType) -> None:
    """Checkpoints are complete or not there."""
    save = delegate("trainer", "save_checkpoint")
    needs = ("self", "model", "trial")
    wrap(find_class(module, "Trainer"), "_save_checkpoint", save, needs, _arguments_of)


def patch_load_optimizer_and_scheduler(module: ModuleType) -> None:
    """The optimizer's state is read on the host."""
    load = delegate("trainer", "load_optimizer_and_scheduler")
    needs = ("self", "checkpoint")
    wrap(find_class(module, "Trainer"), "_load_optimizer_and_scheduler", load, needs, _arguments_of)


def patch_load_from_checkpoint(module: ModuleType) -> None:
    """A model has weights before others are loaded into it."""
    load = delegate("early_forward", "load_from_checkpoint")
    needs = ("self", "resume_from_checkpoint")
    wrap(find_class(module, "Trainer"), "_load_from_checkpoint", load, needs, _arguments_of)


def patch_get_batch_samples(module: ModuleType) -> None:
    """A step's micro-batches are seen when the Trainer fetches them."""
    note = delegate("joined_batches", "get_batch_samples")
    needs = ("self", "epoch_iterator", "num_batches")
    wrap(find_class(module, "Trainer"), "get_batch_samples", note, needs, _arguments_of)


def patch_training_step(module: ModuleType) -> None:
    """The last micro-batch of a step may stand for all of them."""
    step = delegate("joined_batches", "training_step")
    needs = ("self", "model", "inputs", "num_items_in_batch")
    wrap(find_class(module, "Trainer"), "training_step", step, needs, _arguments_of)


def patch_progress(module: ModuleType) -> None:
    """The console's lines are short."""
    wrap_always(find_class(module, "ProgressCallback"), "on_log", console.on_log, needs=("self", "state", "logs"))


def patch_printer(module: ModuleType) -> None:
    """As :func:`patch_progress`, where bars are off."""
    wrap_always(find_class(module, "PrinterCallback"), "on_log", console.on_log, needs=("self", "state", "logs"))


def patch_label_smoother(module: ModuleType) -> None:
    """The smoothed loss of lazy logits is computed by tiles."""
    smooth = delegate("smoothing", "label_smoothed_loss")
    wrap(find_class(module, "LabelSmoother"), "__call__", smooth, needs=("self", "model_output", "labels", "shift_labels"))


def patch_from_pretrained(module: ModuleType) -> None:
    """Models are loaded to the host."""

    def from_pretrained(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        device_map = kwargs.pop("device_map", None)
        if device_map is not None:
            logger.warning(
                "megatrain: device_map=%r is ignored; the weights are loaded to host memory and megatrain decides what "
                "goes to the GPU",
                device_map,
            )
        return original(*args, **kwargs)

    wrap(find_class(module, "PreTrainedModel"), "from_pretrained", from_pretrained, needs=("cls", "kwargs"))

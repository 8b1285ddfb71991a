"""The patches of ``transformers.trainer`` and of model loading; what they mean is in :mod:`.trainer`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatrain_accelerate.integrations.wrapping import UnknownShapeError, delegate, find_class, wrap

logger = logging.getLogger(__name__)


def patch_init(module: ModuleType) -> None:
    """The Trainer's model is watched until it is prepared."""
    after = delegate("early_forward", "after_trainer_init")
    wrap(find_class(module, "Trainer"), "__init__", after, needs=("self", "model"))


def patch_move_model_to_device(module: ModuleType) -> None:
    """The Trainer places no model."""
    move = delegate("trainer", "move_model_to_device")
    wrap(find_class(module, "Trainer"), "_move_model_to_device", move, needs=("self", "model", "device"))


def patch_save_checkpoint(module: ModuleType) -> None:
    """Checkpoints are complete or not there."""
    save = delegate("trainer", "save_checkpoint")
    wrap(find_class(module, "Trainer"), "_save_checkpoint", save, needs=("self", "model", "trial"))


def patch_load_optimizer_and_scheduler(module: ModuleType) -> None:
    """The optimizer's state is read on the host."""
    load = delegate("trainer", "load_optimizer_and_scheduler")
    wrap(find_class(module, "Trainer"), "_load_optimizer_and_scheduler", load, needs=("self", "checkpoint"))


def patch_default_callbacks(module: ModuleType) -> None:
    """A Trainer made while the plugin is on gets our callback, before those of the trackers."""
    name = "get_reporting_integration_callbacks"
    init = inspect.unwrap(find_class(module, "Trainer").__init__)  # type: ignore[misc]
    if name not in init.__code__.co_names:
        raise UnknownShapeError(f"Trainer.__init__ doesn't call {name}")

    def callbacks(original: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
        from megatrain_accelerate.integrations.trainer import MegatrainCallback

        return [MegatrainCallback, *original(*args, **kwargs)]

    wrap(module, name, callbacks)


def patch_load_from_checkpoint(module: ModuleType) -> None:
    """A model has weights before others are loaded into it."""
    load = delegate("early_forward", "load_from_checkpoint")
    wrap(find_class(module, "Trainer"), "_load_from_checkpoint", load, needs=("self", "resume_from_checkpoint"))


def patch_get_batch_samples(module: ModuleType) -> None:
    """A step's micro-batches are seen when the Trainer fetches them."""
    note = delegate("joined_batches", "get_batch_samples")
    wrap(find_class(module, "Trainer"), "get_batch_samples", note, needs=("self", "epoch_iterator", "num_batches"))


def patch_training_step(module: ModuleType) -> None:
    """The last micro-batch of a step may stand for all of them."""
    step = delegate("joined_batches", "training_step")
    wrap(find_class(module, "Trainer"), "training_step", step, needs=("self", "model", "inputs", "num_items_in_batch"))


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

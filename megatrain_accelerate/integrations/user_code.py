"""Whether code of the user's runs between the backwards of a step and the step itself, within a Trainer's training.

Such code may change gradients, and read weights, which in plain PyTorch are those from before the step. Where there is any,
layers aren't stepped in backward, and the micro-batches of a step aren't run as one.
"""

from __future__ import annotations

from typing import Any

_CALLBACKS_THAT_DO_NOT_LOOK = ("transformers", "megatrain_accelerate")
"""Packages whose callbacks look at neither weights nor gradients before a step."""
_TRAINERS_THAT_DO_NOT_LOOK = ("transformers", "trl", "sentence_transformers", "setfit")
"""Packages whose Trainers look at neither weights nor gradients between a micro-batch's backward and the step."""


def _is_a_users(owner: Any, name: str, packages: tuple[str, ...]) -> bool:
    """Whether the method of this name comes from outside of ``packages``."""
    if name in vars(owner):
        return True
    found = next((cls for cls in type(owner).__mro__ if name in vars(cls)), None)
    return found is not None and found.__module__.partition(".")[0] not in packages


def has_users_callback(trainer: Any, event: str) -> bool:
    """Whether a callback of the user's is called at an event, ``on_substep_end`` say."""
    return any(_is_a_users(callback, event, _CALLBACKS_THAT_DO_NOT_LOOK) for callback in trainer.callback_handler.callbacks)


def looks_before_step(trainer: Any) -> bool:
    """Whether code of the user's runs between a step's last backward and the step."""
    return has_users_callback(trainer, "on_pre_optimizer_step") or _is_a_users(
        trainer, "training_step", _TRAINERS_THAT_DO_NOT_LOOK
    )

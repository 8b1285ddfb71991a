"""The patches of ``accelerate.accelerator``; what they mean is in :mod:`.accelerate_backend`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from megatrain_accelerate.integrations.wrapping import delegate, find_class, is_active, wrap, wrap_always

_BACKEND = "accelerate_backend"
_ARGUMENTS = "_megatrain_arguments"

_trainer_arguments: Any = None
"""Those of the Trainer that makes an Accelerator at this moment."""


@contextlib.contextmanager
def making_accelerator(arguments: Any) -> Iterator[None]:
    """Accelerators that are made in the body belong to the Trainer with these training arguments."""
    global _trainer_arguments
    outer, _trainer_arguments = _trainer_arguments, arguments
    try:
        yield
    finally:
        _trainer_arguments = outer


def arguments_of(accelerator: Any) -> Any:
    """The training arguments of the Trainer that made an Accelerator; None if a script did."""
    return accelerator.__dict__.get(_ARGUMENTS)


def patch_init(module: ModuleType) -> None:
    """Checks each new Accelerator."""
    check = delegate(_BACKEND, "require_servable")

    def init(original: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
        original(accelerator, *args, **kwargs)
        if _trainer_arguments is not None:
            accelerator.__dict__[_ARGUMENTS] = _trainer_arguments
        if is_active(_trainer_arguments):
            check(accelerator)

    wrap_always(find_class(module, "Accelerator"), "__init__", init, needs=("self",))


def patch_prepare(module: ModuleType) -> None:
    """A module is seen together with those that are prepared in the same call."""
    wrap(find_class(module, "Accelerator"), "prepare", delegate(_BACKEND, "prepare"), ("self", "args"))


def patch_prepare_model(module: ModuleType) -> None:
    """The engine is attached to a model that is prepared."""
    needs = ("self", "model", "device_placement", "evaluation_mode")
    wrap(find_class(module, "Accelerator"), "prepare_model", delegate(_BACKEND, "prepare_model"), needs, arguments_of)


def patch_prepare_optimizer(module: ModuleType) -> None:
    """The optimizer steps on the host store."""
    needs = ("self", "optimizer", "device_placement")
    wrap(find_class(module, "Accelerator"), "prepare_optimizer", delegate(_BACKEND, "prepare_optimizer"), needs, arguments_of)


def patch_clip_grad_norm(module: ModuleType) -> None:
    """Clipping is a part of the fused step."""
    needs = ("self", "parameters", "max_norm", "norm_type")
    wrap(find_class(module, "Accelerator"), "clip_grad_norm_", delegate(_BACKEND, "clip_grad_norm"), needs, arguments_of)


def patch_free_memory(module: ModuleType) -> None:
    """The engines are let go of."""
    needs = ("self", "objects")
    wrap(find_class(module, "Accelerator"), "free_memory", delegate(_BACKEND, "free_memory"), needs, arguments_of)

"""The patches of ``accelerate.accelerator``; what they mean is in :mod:`.accelerate_backend`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatrain_accelerate.integrations.wrapping import delegate, find_class, is_active, wrap, wrap_always

_BACKEND = "accelerate_backend"


def patch_init(module: ModuleType) -> None:
    """Checks each new Accelerator."""
    after = delegate(_BACKEND, "after_accelerator_init")

    def init(original: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
        original(accelerator, *args, **kwargs)
        if is_active():
            after(accelerator)

    wrap_always(find_class(module, "Accelerator"), "__init__", init, needs=("self",))


def patch_prepare_model(module: ModuleType) -> None:
    """The engine is attached to a model that is prepared."""
    needs = ("self", "model", "device_placement", "evaluation_mode")
    wrap(find_class(module, "Accelerator"), "prepare_model", delegate(_BACKEND, "prepare_model"), needs)


def patch_prepare_optimizer(module: ModuleType) -> None:
    """The optimizer steps on the host store."""
    needs = ("self", "optimizer", "device_placement")
    wrap(find_class(module, "Accelerator"), "prepare_optimizer", delegate(_BACKEND, "prepare_optimizer"), needs)


def patch_clip_grad_norm(module: ModuleType) -> None:
    """Clipping is a part of the fused step."""
    needs = ("self", "parameters", "max_norm", "norm_type")
    wrap(find_class(module, "Accelerator"), "clip_grad_norm_", delegate(_BACKEND, "clip_grad_norm"), needs)


def patch_free_memory(module: ModuleType) -> None:
    """The engines are let go of."""
    wrap(find_class(module, "Accelerator"), "free_memory", delegate(_BACKEND, "free_memory"), ("self", "objects"))

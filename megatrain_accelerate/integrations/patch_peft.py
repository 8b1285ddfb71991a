"""The patches of ``peft``; what they mean is in :mod:`.adapters`."""

from __future__ import annotations

from types import ModuleType

from megatrain_accelerate.integrations.wrapping import delegate, find_class, wrap, wrap_in_subclasses

_OWN_BEFORE_0_18 = ("merge_and_unload", "set_adapter", "unload")
"""Methods that each kind of adapter had of its own before PEFT 0.18, and most inherit since."""


def _wrap_tuner(module: ModuleType, name: str, meaning: str) -> None:
    tuner = find_class(module, "BaseTuner")
    replacement = delegate("adapters", meaning)
    old = not any(method in vars(tuner) for method in _OWN_BEFORE_0_18)
    if not (old and name in _OWN_BEFORE_0_18):
        wrap(tuner, name, replacement, needs=("self",))
    wrap_in_subclasses(tuner, name, replacement)


def patch_merge_and_unload(module: ModuleType) -> None:
    """The merged model is a plain one."""
    _wrap_tuner(module, "merge_and_unload", "leave_then")


def patch_unload(module: ModuleType) -> None:
    """The model without adapters is a plain one."""
    _wrap_tuner(module, "unload", "leave_then")


def patch_merge_adapter(module: ModuleType) -> None:
    """Merged weights are streamed."""
    _wrap_tuner(module, "merge_adapter", "write_through")


def patch_unmerge_adapter(module: ModuleType) -> None:
    """Unmerged weights are streamed."""
    _wrap_tuner(module, "unmerge_adapter", "write_through")


def patch_set_adapter(module: ModuleType) -> None:
    """Weights that another adapter unmerges are streamed."""
    _wrap_tuner(module, "set_adapter", "unmerge_first")


def patch_disable_adapter_layers(module: ModuleType) -> None:
    """Weights that disabling unmerges are streamed."""
    _wrap_tuner(module, "disable_adapter_layers", "unmerge_first")

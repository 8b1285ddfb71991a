"""The patches of ``peft``; what they mean is in :mod:`.adapters`."""

from __future__ import annotations

from types import ModuleType

from megatrain_accelerate.integrations.wrapping import delegate, find_class, wrap

_MEANING = "adapters"


def patch_merge_and_unload(module: ModuleType) -> None:
    """The merged model is a plain one."""
    wrap(find_class(module, "BaseTuner"), "merge_and_unload", delegate(_MEANING, "leave_then"), needs=("self",))


def patch_unload(module: ModuleType) -> None:
    """The model without adapters is a plain one."""
    wrap(find_class(module, "BaseTuner"), "unload", delegate(_MEANING, "leave_then"), needs=("self",))


def patch_merge_adapter(module: ModuleType) -> None:
    """Merged weights are streamed."""
    wrap(find_class(module, "BaseTuner"), "merge_adapter", delegate(_MEANING, "write_through"), needs=("self",))


def patch_unmerge_adapter(module: ModuleType) -> None:
    """Unmerged weights are streamed."""
    wrap(find_class(module, "BaseTuner"), "unmerge_adapter", delegate(_MEANING, "write_through"), needs=("self",))

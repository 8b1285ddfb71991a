"""The patches of ``trl``; what they mean is in :mod:`.reference_model`."""

from __future__ import annotations

from types import ModuleType

from megatrain_accelerate.integrations import console
from megatrain_accelerate.integrations.wrapping import delegate, find_class, wrap, wrap_always


def patch_sync_reference(module: ModuleType) -> None:
    """The policy's weights are mixed into a reference model's as they are after the last step."""
    mix = delegate("reference_model", "sync_target_model")
    wrap(find_class(module, "SyncRefModelCallback"), "sync_target_model", mix, needs=("model", "target_model", "alpha"))


def patch_rich_progress(module: ModuleType) -> None:
    """The console's tables are short."""
    wrap_always(find_class(module, "RichProgressCallback"), "on_log", console.on_log, needs=("self", "state", "logs"))

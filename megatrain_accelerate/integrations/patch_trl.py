"""The patches of ``trl``; what they mean is in :mod:`.reference_model`."""

from __future__ import annotations

from types import ModuleType

from megatrain_accelerate.integrations.wrapping import delegate, find_class, wrap


def patch_sync_reference(module: ModuleType) -> None:
    """The policy's weights are mixed into a reference model's as they are after the last step."""
    mix = delegate("reference_model", "sync_target_model")
    wrap(find_class(module, "SyncRefModelCallback"), "sync_target_model", mix, needs=("model", "target_model", "alpha"))

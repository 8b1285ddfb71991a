"""The patches of ``trl``; what they mean is in :mod:`.reference_model`."""

from __future__ import annotations

from types import ModuleType

from megatrain_accelerate.integrations.wrapping import delegate, find_class, wrap


def patch_sync_reference(module: ModuleType) -> None:
    """The policy's weights are mixed into a reference model's as they are after the last step."""
    mix = delegate("reference_model", "sync_target_model")
    wrap(find_class(module, "SyncRefModelCallback"), "sync_target_model", mix, needs=("model", "target_model", "alpha"))


def patch_average(module: ModuleType) -> None:
    """The average of the weights (BEMA) takes them as they are after the last step; older versions of TRL have none."""
    if hasattr(module, "BEMACallback"):
        average = delegate("reference_model", "average_at_step_end")
        wrap(find_class(module, "BEMACallback"), "on_step_end", average, needs=("args", "state", "control", "model"))

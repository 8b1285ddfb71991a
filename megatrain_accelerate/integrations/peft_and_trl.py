"""What PEFT and TRL do to a prepared model: adapters are merged, unmerged and unloaded, a reference follows the policy.

Both read and write ``parameter.data``, which shows neither that a step is still to be applied nor that somebody wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.integrations.shared_parts import engines_with

logger = logging.getLogger(__name__)


def leave_then(original: Callable[..., Any], tuner: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``merge_and_unload`` and ``unload``: takes the model apart, so the engine gives it back first, with all steps applied.

    The weights lie in ordinary host memory then, those of adapters as exact as their masters.
    """
    for engine in engines_with(tuner):
        logger.info("megatrain: the model isn't streamed any more, since its adapters are unloaded")
        engine.close()
    return original(tuner, *args, **kwargs)


def write_through(original: Callable[..., Any], tuner: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``merge_adapter`` and ``unmerge_adapter``: the base's weights are read after the last step, and streamed as written."""
    engines = engines_with(tuner)
    for engine in engines:
        engine.drain()
    try:
        return original(tuner, *args, **kwargs)
    finally:
        for engine in engines:
            _take_over_frozen(engine)


def unmerge_first(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """``set_adapter`` and ``disable_adapter_layers``: adapters that are merged are unmerged now.

    PEFT does so by itself, but when a layer runs next; what that writes to is the layer's slot here.
    """
    if engines_with(tuner) and any(getattr(module, "merged", False) for module in tuner.modules()):
        tuner.unmerge_adapter()
    return original(tuner, *args, **kwargs)


def _take_over_frozen(engine: Engine) -> None:
    for unit in engine.runtime.units:
        for state in unit.states:
            if not state.entry.spec.trainable:
                state.handle.mark_written()
    engine.drain()


def sync_target_model(original: Callable[..., Any], model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    """Moves TRL's reference towards the policy: ``target = (1 - alpha) * target + alpha * model``, in fp32."""
    engines = [engine for engine in (engine_of(model), engine_of(target_model)) if engine is not None]
    if not engines:
        original(model, target_model, alpha)
        return
    for engine in engines:
        engine.drain()
    with torch.no_grad():
        for target, source in zip(target_model.parameters(), model.parameters(), strict=True):
            mixed = target.float().mul(1.0 - alpha)
            target.copy_(mixed.add_(source.to(target.device, torch.float32), alpha=alpha))
    for engine in engines:
        engine.drain()

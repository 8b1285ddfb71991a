"""TRL's reference model that follows the trained one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.engine import engine_of


def sync_target_model(original: Callable[..., Any], model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    """Moves the reference towards the policy: ``target = (1 - alpha) * target + alpha * model``, in fp32.

    TRL's own way reads and writes ``parameter.data``, which shows neither that a step of the policy is still to be applied
    nor that the reference was written to.
    """
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

"""Who else holds a prepared model's parameters: a model around it or inside of it, PEFT, TRL. A parameter has one place in one
host store: a model that is prepared adopts what another's engine had. PEFT and TRL read and write ``parameter.data``, which
shows neither that a step is still to be applied nor that somebody wrote."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine, all_engines, engine_of, prepared_models
from megatrain_accelerate.errors import StateError
from megatrain_accelerate.hooks import ModelHook
from megatrain_accelerate.plan.layer_discovery import discover_layers

logger = logging.getLogger(__name__)


def refuse_calls(earlier: nn.Module) -> None:
    """Lets calls of a model raise while others have a part of it and don't run the whole."""
    if new_holder(earlier) is None:
        return

    def refuse(model: nn.Module, args: Any) -> None:
        if (holder := new_holder(model)) is None:
            handle.remove()
            return
        other, engine = holder
        parameters = list(model.parameters())
        shared = sum(engine.runtime.state_of(parameter) is not None for parameter in parameters)
        raise StateError(
            f"this {type(model).__name__} shares {shared} of its {len(parameters)} parameters with a {type(other).__name__} "
            "that was prepared after it and has them now; prepare it anew before it is called, or give each a copy of its own"
        )

    handle = earlier.register_forward_pre_hook(ModelHook(refuse, with_arguments=True))


def take_over(model: nn.Module, config: MegatrainConfig) -> tuple[list[nn.Module], list[torch.optim.Optimizer], bool]:
    """Closes the engines of all other models that stream layers of this one, or train parameters with it; frozen parameters
    alone (a teacher's embedding) may lie in both stores. Returns those models, their optimizers, and whether one of the
    engines was made for training. An ``UnsupportedError``, with nothing closed, where the model has no layers that could
    stream."""
    sharing = [engine for engine in all_engines() if _conflicts(model, engine)]
    models = [other for other, engine in prepared_models() if engine in sharing]
    optimizers = [optimizer for engine in sharing for optimizer in engine.optimizers]
    if sharing:
        discover_layers(model, config.layer_classes)
    for engine in sharing:
        logger.info("megatrain: a model that shares parameters with this one isn't streamed any more; this one has them now")
        engine.close()
    return models, optimizers, any(engine.training for engine in sharing)


def engines_with(part: nn.Module) -> list[Engine]:
    """The engines of the prepared models that ``part`` is a module of, or is."""
    return [engine for model, engine in prepared_models() if any(module is part for module in model.modules())]


def new_holder(model: nn.Module) -> tuple[nn.Module, Engine] | None:
    """A prepared model that holds parameters of this one, of which not all modules are its own; None if there is none."""
    if engine_of(model) is not None:
        return None
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    for other, engine in prepared_models():
        if _conflicts(model, engine) and not set(other.modules()).issuperset(owners):
            return other, engine
    return None


def _conflicts(model: nn.Module, engine: Engine) -> bool:
    modules = set(model.modules())
    if any(at.module in modules for at in (*engine.runtime.layers, *engine.runtime.experts)):
        return True
    shared = (parameter for parameter in model.parameters() if engine.runtime.state_of(parameter) is not None)
    return any(parameter.requires_grad or engine.runtime.trains(parameter) for parameter in shared)


def leave_then(original: Callable[..., Any], tuner: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``merge_and_unload`` and ``unload``: takes the model apart, so the engine gives it back first, with all steps applied:
    in ordinary host memory, adapters as exact as their masters."""
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
            for state in (state for unit in engine.runtime.units for state in unit.states):
                if not state.entry.spec.trainable:
                    state.handle.mark_written()
            engine.drain()


def unmerge_first(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """``set_adapter`` and ``disable_adapter_layers``: adapters that are merged are unmerged now. PEFT does so by itself, but
    when a layer runs next; what that writes to is the layer's slot here."""
    if engines_with(tuner) and any(getattr(module, "merged", False) for module in tuner.modules()):
        tuner.unmerge_adapter()
    return original(tuner, *args, **kwargs)


def sync_target_model(original: Callable[..., Any], model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    """TRL's reference follows the policy: ``(1 - alpha) * target + alpha * model``, in fp32."""
    engines = [engine for engine in (engine_of(model), engine_of(target_model)) if engine is not None]
    for engine in engines:
        engine.drain()
    if not engines:
        original(model, target_model, alpha)
        return
    with torch.no_grad():
        for target, source in zip(target_model.parameters(), model.parameters(), strict=True):
            mixed = target.float().mul(1.0 - alpha)
            target.copy_(mixed.add_(source.to(target.device, torch.float32), alpha=alpha))
    for engine in engines:
        engine.drain()

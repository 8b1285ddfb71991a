"""Who else holds a prepared model's parameters: a model around it or inside of it, PEFT, TRL. A trained parameter is in one
host store only, so a model that is prepared takes over what another one's engine had. PEFT and TRL read and write
``parameter.data``, which neither waits for pending steps nor shows that somebody wrote."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine, all_engines, engine_of, prepared_models
from megatrain_accelerate.errors import StateError
from megatrain_accelerate.hooks import ModelHook
from megatrain_accelerate.plan.layer_discovery import discover_layers
from megatrain_accelerate.store.layout import ParameterSpec

logger = logging.getLogger(__name__)


def refuse_calls(earlier: nn.Module) -> None:
    """Makes calls of a model raise ``StateError`` while another prepared model has a part of it but not all of its modules."""
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
    """Closes the engines of all other models that stream layers of this one or share trained parameters with it. Frozen
    parameters (a teacher's embedding) may be in both stores. Returns those models, their optimizers, and whether one of the
    engines was made for training. Raises ``UnsupportedError``, with nothing closed, if this model has no layers that could
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
    """The engines of the prepared models that are ``part`` or contain it."""
    return [engine for model, engine in prepared_models() if any(module is part for module in model.modules())]


def new_holder(model: nn.Module) -> tuple[nn.Module, Engine] | None:
    """A prepared model, and its engine, that has parameters of this one but not all of its modules; None if there is none."""
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
    """PEFT's ``merge_and_unload`` and ``unload`` take the model apart. The engine gives it back first, with all steps applied,
    in ordinary host memory, and with adapters as exact as their masters."""
    for engine in engines_with(tuner):
        logger.info("megatrain: the model isn't streamed any more, since its adapters are unloaded")
        engine.close()
    return original(tuner, *args, **kwargs)


def write_through(original: Callable[..., Any], tuner: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """PEFT's ``merge_adapter`` and ``unmerge_adapter``: applies steps before, and takes over written base weights after."""
    with _taking_over(tuner, lambda spec: not spec.trainable):
        return original(tuner, *args, **kwargs)


def swap_adapter(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """PEFT's ``hotswap_adapter``: applies steps before, and takes over the written weights of LoRA's adapters after."""
    with _taking_over(model, lambda spec: "lora_" in spec.name):
        return original(model, *args, **kwargs)


@contextlib.contextmanager
def _taking_over(part: nn.Module, is_written: Callable[[ParameterSpec], bool]) -> Iterator[None]:
    """Applies steps of a prepared model before the body, and takes over the weights that it may have written after it."""
    engines = engines_with(part)
    for engine in engines:
        engine.drain()
    try:
        yield
    finally:
        for engine in engines:
            for state in (state for unit in engine.runtime.units for state in unit.states):
                if is_written(state.entry.spec):
                    state.handle.mark_written()
            engine.drain()


def unmerge_first(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT's ``set_adapter`` and ``disable_adapter_layers``: unmerges merged adapters first. PEFT does so by itself, but only
    when a layer next runs, and would write to the layer's slot."""
    if engines_with(tuner) and any(getattr(module, "merged", False) for module in tuner.modules()):
        tuner.unmerge_adapter()
    return original(tuner, *args, **kwargs)


def sync_target_model(original: Callable[..., Any], model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    """TRL's update of a reference model by the policy, in fp32: ``(1 - alpha) * target + alpha * model``."""
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

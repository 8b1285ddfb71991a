"""A model that shares parameters with one that was prepared before: adapters around it, a wrapper, a part of it.

A parameter has one place in one host store, so the engine of the earlier model gives its weights back, and the model that
is prepared now adopts them.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine, all_engines, engine_of, prepared_models
from megatrain_accelerate.errors import StateError
from megatrain_accelerate.planning.layer_discovery import discover_layers
from megatrain_accelerate.streaming.model_hook import ModelHook

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class TakenOver:
    """What earlier engines left that held some of a model's parameters.

    Attributes:
        models: those they belonged to.
        optimizers: those that stepped there.
        trained: whether one of them was made for training.
    """

    models: list[weakref.ref[nn.Module]] = dataclasses.field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = dataclasses.field(default_factory=list)
    trained: bool = False

    def refuse_calls(self) -> None:
        """Lets calls of the earlier models raise while others have a part of them, and don't run the whole of them."""
        for reference in self.models:
            earlier = reference()
            if earlier is not None and new_holder(earlier) is not None:
                _Refusal(earlier)


class _Refusal:
    """The hook on a model that lost parameters to another one. Goes away when nobody else has any."""

    def __init__(self, model: nn.Module) -> None:
        self._handle = model.register_forward_pre_hook(ModelHook(self._refuse, with_arguments=True))

    def _refuse(self, model: nn.Module, args: Any) -> None:
        holder = new_holder(model)
        if holder is None:
            self._handle.remove()
            return
        other, engine = holder
        parameters = list(model.parameters())
        shared = sum(_is_held(parameter, engine) for parameter in parameters)
        raise StateError(
            f"this {type(model).__name__} shares {shared} of its {len(parameters)} parameters with a {type(other).__name__} "
            "that was prepared after it and has them now; prepare it anew before it is called (the other one then has to be "
            "prepared again in turn), or give each a copy of its own"
        )


def take_over(model: nn.Module, config: MegatrainConfig) -> TakenOver:
    """Closes the engines of all other models that stream layers of this one, or train parameters with it.

    Frozen parameters alone (a teacher's embedding) may lie in both stores. What the engines held is the model's again.

    Raises:
        UnsupportedError: the model has no layers that could stream; nothing is closed then.
    """
    taken = TakenOver()
    sharing = [engine for engine in all_engines() if engine is not engine_of(model) and _conflicts(model, engine)]
    if sharing:
        discover_layers(model, config.layer_classes)
    for engine in sharing:
        logger.info("megatrain: a model that shares parameters with this one isn't streamed any more; this one has them now")
        taken.models += [weakref.ref(other) for other, its_engine in prepared_models() if its_engine is engine]
        taken.optimizers += [driver.optimizer for driver in engine.optimizer_drivers if driver.optimizer is not None]
        taken.trained |= engine.training
        engine.close()
    return taken


def engines_with(part: nn.Module) -> list[Engine]:
    """The engines of the prepared models that ``part`` is a module of, or is."""
    return [engine for model, engine in prepared_models() if any(module is part for module in model.modules())]


def new_holder(model: nn.Module) -> tuple[nn.Module, Engine] | None:
    """A prepared model that holds parameters of this one, of which not all modules are its own; None if there is none."""
    if engine_of(model) is not None:
        return None
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    for other, engine in prepared_models():
        its_own = set(other.modules())
        if _conflicts(model, engine) and not its_own.issuperset(owners):
            return other, engine
    return None


def _conflicts(model: nn.Module, engine: Engine) -> bool:
    modules = set(model.modules())
    if any(at.module in modules for at in (*engine.runtime.layers, *engine.runtime.experts)):
        return True
    shared = (parameter for parameter in model.parameters() if _is_held(parameter, engine))
    return any(parameter.requires_grad or engine.runtime.norms.row(parameter) is not None for parameter in shared)


def _is_held(parameter: nn.Parameter, engine: Engine) -> bool:
    state = engine.runtime.state_of(parameter)
    return state is not None and state.parameter is parameter

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

from megatrain_accelerate.engine import Engine, all_engines, engine_of, prepared_models
from megatrain_accelerate.errors import StateError
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

    def refuse_calls(self, model: nn.Module, engine: Engine) -> None:
        """Lets calls of the earlier models raise while ``engine``, which is ``model``'s, holds only a part of them."""
        for reference in self.models:
            earlier = reference()
            if earlier is not None and not all(_is_held(parameter, engine) for parameter in earlier.parameters()):
                _Refusal(earlier, type(model).__name__, engine)

    def optimizers_for(self, engine: Engine) -> list[torch.optim.Optimizer]:
        """Those that can go on with this engine: it has all of their parameters that have a gradient."""
        return [
            optimizer
            for optimizer in self.optimizers
            if all(p.grad is None or _is_held(p, engine) for group in optimizer.param_groups for p in group["params"])
        ]


class _Refusal:
    """The hook on a model that lost parameters to another one. Goes away with the other one's engine."""

    def __init__(self, model: nn.Module, other: str, engine: Engine) -> None:
        self._other = other
        self._engine = weakref.ref(engine)
        self._handle = model.register_forward_pre_hook(ModelHook(self._refuse, with_arguments=True))

    def _refuse(self, model: nn.Module, args: Any) -> None:
        engine = self._engine()
        if engine is None or engine.is_closed:
            self._handle.remove()
            return
        parameters = list(model.parameters())
        shared = sum(_is_held(parameter, engine) for parameter in parameters)
        raise StateError(
            f"this {type(model).__name__} shares {shared} of its {len(parameters)} parameters with a {self._other} that was "
            "prepared after it and has them now; prepare it anew before it is called (the other one then has to be prepared "
            "again in turn), or give each a copy of its own"
        )


def take_over(model: nn.Module) -> TakenOver:
    """Closes the engines of all other models that hold parameters of this one; their weights are the model's again."""
    taken = TakenOver()
    for engine in all_engines():
        if engine is engine_of(model) or not any(_is_held(parameter, engine) for parameter in model.parameters()):
            continue
        logger.info("megatrain: a model that shares parameters with this one isn't streamed any more; this one has them now")
        taken.models += [weakref.ref(other) for other, its_engine in prepared_models() if its_engine is engine]
        taken.optimizers += [driver.optimizer for driver in engine.optimizer_drivers if driver.optimizer is not None]
        taken.trained |= engine.training
        engine.close()
    return taken


def _is_held(parameter: nn.Parameter, engine: Engine) -> bool:
    state = engine.runtime.state_of(parameter)
    return state is not None and state.parameter is parameter

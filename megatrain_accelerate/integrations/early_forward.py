"""A model that its Trainer runs before it trains it: it must be streamed from the first batch on.

The stock Trainer moves the model to the GPU when it is made, so its code may call the model at once: TRL computes the
reference's log-probabilities in the constructor. Here the weights are still on the host then, all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.integrations.shared_parts import engines_with, new_holder
from megatrain_accelerate.planning.adoption import is_without_weights


def watch_model(trainer: Any) -> None:
    """Watches the Trainer's model until it is prepared."""
    model = getattr(trainer, "model", None)
    if isinstance(model, nn.Module) and engine_of(model) is None:
        hook = _PrepareFirst(trainer)
        # After the model's own hooks, but before one that refuses calls until it is prepared.
        hook.handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=new_holder(model) is not None)


def load_from_checkpoint(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Gives the Trainer's model weights in the store, if it was built without any, and loads the checkpoint into them."""
    model = getattr(trainer, "model", None)
    if isinstance(model, nn.Module) and engine_of(model) is None and is_without_weights(model):
        trainer.accelerator.prepare_model(model)
    original(trainer, *args, **kwargs)


class _PrepareFirst:
    """A forward pre-hook that prepares the model for a batch that is where the Trainer computes. Copies of it do nothing."""

    def __init__(self, trainer: Any = None) -> None:
        self._trainer = (lambda: None) if trainer is None else weakref.ref(trainer)
        self.handle: Any = None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trainer = self._trainer()
        # Inside of another prepared model its layers stream as that one's.
        is_inside = bool(engines_with(model))
        if trainer is not None and not is_inside:
            device = trainer.accelerator.device
            places = {leaf.device.type for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)}
            if places != {device.type}:
                return  # an ordinary call on the host, where the weights are
            trainer.accelerator.prepare_model(model, evaluation_mode=not torch.is_grad_enabled())
        if self.handle is not None:
            self.handle.remove()

    def __reduce__(self) -> tuple[type[_PrepareFirst], tuple[()]]:
        return _PrepareFirst, ()

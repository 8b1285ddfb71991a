"""Whether a training's micro-batches may run as one batch, as far as the model and the settings tell.

The Trainer's training tries it out on the first step (``planning/loss_probe.py``); here there are no numbers to compare.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.planning.loss_probe import what_sees_a_batch
from megatrain_accelerate.planning.step_outline import outline_step
from megatrain_accelerate.streaming.runtime import StreamingRuntime


def may_join(model: nn.Module, runtime: StreamingRuntime, config: MegatrainConfig) -> bool:
    """Whether nothing that can be seen is against it (``integrations/joined_batches.py``).

    Args:
        model: on any device.
        runtime: its engine's.
        config: the settings.
    """
    if not config.join_micro_batches or runtime.experts:
        return False
    return _accepts_loss_kwargs(model) and what_sees_a_batch(model) is None


def takes_number_of_items(model: nn.Module, runtime: StreamingRuntime, length: int) -> bool:
    """Whether the model computes anything with ``num_items_in_batch``, which many accept and leave alone.

    Args:
        model: on the meta device; run without data.
        runtime: its engine's.
        length: tokens to run it on.

    Raises:
        Exception: whatever the model raises when it looks at its data.
    """
    ids = torch.zeros((1, length), dtype=torch.long)
    number = _Number(length)
    number.is_used = False
    outline_step(model, runtime, {"input_ids": ids, "labels": ids, "num_items_in_batch": number}, torch.device("cpu"))
    return number.is_used


class _Number(int):
    """Notes that an operation of torch took it, and is an ordinary number to it."""

    is_used: bool

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, cls):
                value.is_used = True
                return int(value)
            return value

        return function(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()})


def _accepts_loss_kwargs(model: nn.Module) -> bool:
    """As the Trainer finds out whether the model takes ``num_items_in_batch`` (transformers/trainer.py)."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)

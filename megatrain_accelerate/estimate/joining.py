"""Whether a training's micro-batches may run as one batch, as far as the model and the settings tell."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.planning.step_outline import outline_step, what_sees_a_batch
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


def sums_loss(model: nn.Module, runtime: StreamingRuntime, length: int) -> bool:
    """Whether the model's loss is known to be a sum over tokens, divided by the number of all (``planning/step_outline.py``).

    Args:
        model: on the meta device; run without data.
        runtime: its engine's.
        length: tokens to run it on.

    Raises:
        Exception: whatever the model raises when it looks at its data.
    """
    ids = torch.zeros((1, length), dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(length)}
    return outline_step(model, runtime, inputs, torch.device("cpu")).sums_loss


def _accepts_loss_kwargs(model: nn.Module) -> bool:
    """As the Trainer finds out whether the model takes ``num_items_in_batch`` (transformers/trainer.py)."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)

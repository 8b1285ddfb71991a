"""Whether the loss of several micro-batches at once is the sum of their losses. It is known of transformers' own losses only.

The value of a loss can't tell: a weight that compares the tokens of a batch may be 1 for all of them in the first step, and
a term of the model's own may be zero. So this module looks at the function that computed the loss, and at the code around it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.streaming.micro_batches import batch_norms

_KNOWN_PACKAGES = ("transformers", "peft")


def what_sees_a_batch(model: nn.Module) -> str | None:
    """The part of a model that keeps its loss from being the sum over a batch's samples, or None if no such part is known.

    The text follows the word "because" in a message.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    if any(getattr(config, "output_router_logits", False) for config in configs):
        return "the loss balances experts over the tokens of a micro-batch (output_router_logits)"
    return next((f"{name} takes statistics of a micro-batch" for name, _ in batch_norms(model)), None)


def own_loss_code(model: nn.Module) -> str | None:
    """The function outside transformers and PEFT that may contribute to the model's loss, or None if there is none."""
    for module in model.modules():
        if module is model or hasattr(type(module), "loss_function"):
            chosen = getattr(inspect.getattr_static(type(module), "loss_function", None), "fget", None)
            for function in (type(module).forward, chosen, vars(module).get("_loss_function")):
                if function is not None and (function.__module__ or "").split(".")[0] not in _KNOWN_PACKAGES:
                    return f"{type(module).__name__}'s {getattr(function, '__name__', function)}"
    return None


@contextlib.contextmanager
def sums_divided_by(num_items: Any) -> Iterator[list[torch.Tensor]]:
    """Collects the losses that transformers' own functions make in the body as a sum over tokens, divided by ``num_items``.

    Each of them (``ForCausalLMLoss`` and its like) returns what ``fixed_cross_entropy`` returned.

    Args:
        num_items: the very object that is given to the model as ``num_items_in_batch``; None collects nothing.
    """
    module: Any = sys.modules.get("transformers.loss.loss_utils")
    original = getattr(module, "fixed_cross_entropy", None)
    made: list[torch.Tensor] = []
    if original is None or num_items is None:
        yield made
        return

    def noted(source: Any, target: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any) -> Any:
        loss = original(source, target, num_items_in_batch, *args, **kwargs)
        if num_items_in_batch is num_items:
            made.append(loss)
        return loss

    module.fixed_cross_entropy = noted
    try:
        yield made
    finally:
        module.fixed_cross_entropy = original

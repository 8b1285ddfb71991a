"""Whether a model's loss is a sum over its tokens, divided by a number that is handed in: tried out, where it can't be seen.

Signatures don't tell: many a model takes ``num_items_in_batch`` and averages all the same, or adds a term of its own. If the
loss is such a quotient, twice the number makes half the loss, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from megatrain_accelerate.planning.step_memory import buffers_put_back, without_hooks
from megatrain_accelerate.planning.step_outline import call_kind
from megatrain_accelerate.streaming.ambient_state import random_numbers_put_back
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.micro_batches import BatchSplit
from megatrain_accelerate.streaming.runtime import StreamingRuntime

_TOLERANCE = 1e-6
"""Halving is exact; where a GPU kernel adds fp32 numbers in another order each time, a sound loss is refused at worst."""


def what_sees_a_batch(model: nn.Module) -> str | None:
    """What of a model makes its loss on a batch another one than the sum over the batch's samples; None if nothing is known.

    The text completes "because".
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    if any(getattr(config, "output_router_logits", False) for config in configs):
        return "the loss balances experts over the tokens of a micro-batch (output_router_logits)"
    norms = (name for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    return next((f"{name} takes statistics of a micro-batch" for name in norms), None)


class _OneOfAKind:
    """Runs in the place of the layers: one of each kind computes, the others hand on what it returned."""

    def __init__(self, runtime: StreamingRuntime) -> None:
        self._runtime = runtime
        self._outputs: dict[Hashable, Any] = {}

    def __call__(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = call_kind(layer, args, kwargs)
        if kind not in self._outputs:
            split = BatchSplit.of_call(layer.name, args, kwargs, self._runtime.micro_batch_size)
            args, kwargs = split.first_piece(args, kwargs)
            slot = self._runtime.prefetcher.acquire(layer, ())
            try:
                with torch.no_grad(), layer.bound(slot.views(layer.unit.layout)):
                    output = layer.run(args, kwargs)
                # One piece after the other would take as long as a forward: all repeat the first.
                self._outputs[kind] = tree_map_only(torch.Tensor, lambda piece: _repeated(piece, split), output)
            finally:
                self._runtime.prefetcher.release(slot)
        return self._outputs[kind]


def _repeated(piece: torch.Tensor, split: BatchSplit) -> torch.Tensor:
    return torch.cat([piece] * split.count)[: sum(split.sizes)] if split.sizes else piece


def loss_is_divided(
    loss_of: Callable[[Any], torch.Tensor], num_items: torch.Tensor | int, model: nn.Module, runtime: StreamingRuntime
) -> bool | None:
    """Whether the loss is inversely proportional to ``num_items_in_batch``.

    Runs the model twice, with the same random numbers, without its hooks, and with one layer of each kind computing: what
    it costs is the head. No call counts as a real one, and the generators are put back.

    Args:
        loss_of: the loss for a value of ``num_items_in_batch``; calls ``model``.
        num_items: a value.
        model: the prepared model, in training mode; its engine has no step in flight.
        runtime: its engine.

    Returns:
        None if the loss is zero or not finite (no token is labelled), which tells nothing.
    """
    device = runtime.streams.device
    losses = []
    for factor in (1, 2):
        with (
            random_numbers_put_back(device),
            without_hooks(model),
            buffers_put_back(model),
            runtime.layers_run_by(_OneOfAKind(runtime)),
        ):
            losses.append(float(loss_of(factor * num_items).detach()))
    once, half = losses
    if once == 0.0 or not math.isfinite(once):
        return None
    return math.isclose(once, 2 * half, rel_tol=_TOLERANCE)

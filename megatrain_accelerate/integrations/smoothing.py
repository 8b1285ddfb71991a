"""The Trainer's label smoothing on logits that weren't made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from megatrain_accelerate.loss.lazy_logits import LazyLogits


def label_smoothed_loss(
    original: Callable[..., torch.Tensor],
    smoother: Any,
    model_output: Any,
    labels: torch.Tensor,
    shift_labels: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """``LabelSmoother.__call__`` of transformers, by ``cross_entropy`` where the logits are lazy.

    Both are ``(1 - epsilon) * nll + epsilon * (mean over the vocabulary)``, summed over labelled tokens and divided by their
    number or by ``num_items_in_batch``.

    Args:
        original: the plain function.
        smoother: has ``epsilon`` and ``ignore_index``.
        model_output: with logits of (batch, tokens, vocabulary).
        labels: (batch, tokens).
        shift_labels: whether token i's logits are for label i + 1.
        kwargs: ``num_items_in_batch`` of later versions.
    """
    logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
    if not isinstance(logits, LazyLogits) or labels.dim() != logits.dim() - 1 or kwargs.keys() - {"num_items_in_batch"}:
        return original(smoother, model_output, labels, shift_labels=shift_labels, **kwargs)
    if shift_labels:
        logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:]
    labels = labels.reshape(-1)
    is_ignored = labels.eq(smoother.ignore_index)
    loss = functional.cross_entropy(
        logits.view(-1, logits.shape[-1]).float(),
        # As the original takes negative labels.
        labels.clamp(min=0).masked_fill(is_ignored, smoother.ignore_index),
        ignore_index=smoother.ignore_index,
        reduction="sum",
        label_smoothing=smoother.epsilon,
    )
    count = kwargs.get("num_items_in_batch")
    if count is None:
        count = (~is_ignored).sum()
    return loss / (count.to(loss.device) if torch.is_tensor(count) else count)

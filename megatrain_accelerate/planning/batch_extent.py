"""How large a batch is: by it a batch is compared with the one that a plan was made for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

GROWTH = (1.5, 2.0)
"""Room for longer batches in the second plan and in later ones: from the second on it is known that lengths vary."""


@dataclasses.dataclass(frozen=True)
class BatchExtent:
    """The size of a batch, as far as the memory of a step depends on it.

    Of two texts with as many tokens the one with longer rows is larger: attention takes the product of both.
    """

    elements: int = 0
    """Of all tensors: tokens, or pixels."""
    length: int = 0
    """Tokens of a row of text; 0 for other inputs, whose rows aren't sequences."""

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> BatchExtent:
        """That of the keyword arguments of a model's forward."""
        elements = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
        text = _text(inputs)
        return cls(elements, next(iter(text.values())).shape[1] if text else 0)

    def covers(self, other: BatchExtent) -> bool:
        """Whether a step on ``other`` takes no more memory."""
        return other.elements <= self.elements and other.length <= self.length

    def times(self, factor: float) -> BatchExtent:
        """That of a batch which is larger by this factor both ways."""
        return BatchExtent(int(factor * self.elements), int(factor * self.length))

    def joined(self, other: BatchExtent) -> BatchExtent:
        """The smallest one that covers both."""
        return BatchExtent(max(self.elements, other.elements), max(self.length, other.length))


def enlarged(model: nn.Module, inputs: Mapping[str, Any], extent: BatchExtent, growth: float) -> dict[str, Any] | None:
    """A batch of ``growth`` times the extent, of the tokens of ``inputs`` over and over.

    Args:
        model: its configuration bounds the length of a sequence (``max_position_embeddings``).
        inputs: a batch of text, whose kind the larger batch has.
        extent: what is to be covered.
        growth: how many times, in tokens and in the length of a row, as far as the model allows it.

    Returns:
        The keyword arguments; None where the inputs aren't text alone: tokens and, say, images belong together.
    """
    text = _text(inputs)
    if not text:
        return None
    rows_there, length_there = next(iter(text.values())).shape
    length = math.ceil(growth * extent.length)
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        length = max(extent.length, min(length, limit))
    rows = math.ceil(growth * extent.elements / len(text) / length)
    copies = (math.ceil(rows / rows_there), math.ceil(length / length_there))
    return {**inputs, **{name: value.repeat(copies)[:rows, :length].contiguous() for name, value in text.items()}}


def _text(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of token ids, labels and masks, of one shape (B, T); none if there are others but single numbers."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()}
    shapes = {tuple(value.shape) for value in tensors.values()}
    is_text = len(shapes) == 1 and all(value.dim() == 2 and not value.is_floating_point() for value in tensors.values())
    return tensors if is_text else {}

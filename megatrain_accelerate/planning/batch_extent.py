"""The size of a batch, which tells whether a plan that was made for one batch also covers another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

GROWTH_FACTORS = (1.5, 2.0)
"""How much larger than the batches so far the second plan (1.5) and each later plan (2.0) allow batches to be.

The first plan has no such room: only a second plan shows that the sizes of batches vary.
"""


@dataclasses.dataclass(frozen=True)
class BatchExtent:
    """The size of a batch, as far as the memory of a step depends on it.

    Of two batches of text with equally many tokens, the one with longer sequences can need more memory: that of attention
    grows with the number of tokens times the sequence length.
    """

    elements: int = 0
    """Number of elements of all input tensors together; labels and masks count as well, single numbers don't."""
    length: int = 0
    """Sequence length of text, padding included; 0 for other inputs, which are compared by their elements alone."""

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> BatchExtent:
        """Returns the extent of a batch that is given as the keyword arguments of a model's forward."""
        elements = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim())
        text = _text(inputs)
        return cls(elements, next(iter(text.values())).shape[1] if text else 0)

    def covers(self, other: BatchExtent) -> bool:
        """Whether a step on a batch of extent ``other`` needs at most the memory of a step on a batch of this one."""
        return other.elements <= self.elements and (not self.length or other.length <= self.length)

    def scaled(self, factor: float) -> BatchExtent:
        """Returns this extent with elements and length multiplied by ``factor``, rounded down."""
        return BatchExtent(int(factor * self.elements), int(factor * self.length))

    def union(self, other: BatchExtent) -> BatchExtent:
        """Returns the smallest extent that covers both."""
        if not self.elements:
            return other
        is_text = self.length and other.length
        return BatchExtent(max(self.elements, other.elements), max(self.length, other.length) if is_text else 0)


def enlarged_batch(model: nn.Module, inputs: Mapping[str, Any], extent: BatchExtent, growth: float) -> dict[str, Any] | None:
    """Builds a batch of text of ``growth`` times ``extent`` by repeating the tokens of ``inputs``.

    Args:
        model: its configuration bounds the sequence length (``max_position_embeddings``).
        inputs: a batch of text; the larger batch has the same keys and dtypes.
        extent: the extent to enlarge; it may differ from that of ``inputs``.
        growth: factor for both the number of tokens and the sequence length. Where the model bounds the length, the batch has
            more sequences instead.

    Returns:
        The keyword arguments; None if any of the batches is more than text: an image can't be repeated apart from its tokens.
    """
    text = _text(inputs)
    if not text or not extent.length:
        return None
    input_sequences, input_length = next(iter(text.values())).shape
    length = math.ceil(growth * extent.length)
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        length = max(extent.length, min(length, limit))
    # Ids, labels and mask have one shape, and all of them count as elements.
    sequences = math.ceil(growth * extent.elements / len(text) / length)
    copies = (math.ceil(sequences / input_sequences), math.ceil(length / input_length))
    return {**inputs, **{name: value.repeat(copies)[:sequences, :length].contiguous() for name, value in text.items()}}


def _text(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns token ids, labels and masks by name, if all tensors but scalars are integer or bool tensors of one shape (B, T).

    Returns an empty dict otherwise.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()}
    shapes = {tuple(value.shape) for value in tensors.values()}
    is_text = len(shapes) == 1 and all(value.dim() == 2 and not value.is_floating_point() for value in tensors.values())
    return tensors if is_text else {}

"""Padding: what a batch holds after the ends of its shorter sequences. Which tokens are padding, and when it may be left out.

In a causal model what follows a sequence's end affects none of its tokens, and the loss only where a label asks for it: layers
run on the other tokens alone (:mod:`.unpadded_layer`). B samples, T tokens of the longest, N tokens that are computed: the
real ones, and some padding after them, so that N is a multiple of 64.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_WORTH_LEAVING_OUT = 0.1
"""Padding is left out where it is more than this share of a batch: gathering and putting back take time."""
_MULTIPLE = 64
"""The number of computed tokens is rounded up to a multiple of this: products of other numbers of rows are slower."""
_IGNORED = -100
"""The label of a token that transformers' losses leave out."""


@dataclasses.dataclass(frozen=True, eq=False)
class RealTokens:
    """Which tokens of a batch are computed where padding is left out: the first ones of each sample."""

    lengths: tuple[int, ...]
    """Of the samples, in order, without padding."""
    counts: tuple[int, ...]
    """Tokens of each sample that are computed: its length, and some padding to fill up :data:`_MULTIPLE`."""
    width: int
    """Tokens of each sample with its padding: T."""
    index: torch.Tensor
    """int64 (N,), on the device: the computed tokens' places among B x T."""
    columns: torch.Tensor
    """int64 (N,), on the device: their places in their samples."""
    begins: torch.Tensor
    """int32 (B + 1,), on the device: where each sample begins among the N tokens, and N."""
    span: torch.Tensor
    """A tensor without numbers, with as many rows as the longest sample has computed tokens: a graph reads its size."""
    _pieces: dict[tuple[int, ...], list[RealTokens | None]] = dataclasses.field(default_factory=dict)
    """By the samples of each piece: all layers cut a batch alike."""
    _once: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    """What was made of arguments that all layers share (masks, position embeddings), by storage and place in it."""

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> RealTokens | None:
        """The tokens to compute of samples of these lengths, in a batch as wide as ``width``; None where too little would be
        left out, nothing is left, or there is too little padding to fill up a multiple of 64."""
        to_fill_up, counts = -sum(lengths) % _MULTIPLE, []
        for length in lengths:
            more = min(to_fill_up, width - length)
            to_fill_up -= more
            counts.append(length + more)
        if to_fill_up or not sum(counts) or sum(counts) >= (1 - _WORTH_LEAVING_OUT) * len(lengths) * width:
            return None
        return cls.of_counts(lengths, counts, width, device)

    @classmethod
    def of_counts(cls, lengths: Sequence[int], counts: Sequence[int], width: int, device: torch.device) -> RealTokens:
        """The first ``counts`` tokens of each sample."""
        columns = torch.cat([torch.arange(count) for count in counts])
        rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        begins = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        index, columns, begins = (t.to(device, non_blocking=True) for t in (rows * width + columns, columns, begins))
        return cls(tuple(lengths), tuple(counts), width, index, columns, begins, torch.empty(max(counts), 0))

    def of_pieces(self, sizes: tuple[int, ...]) -> list[RealTokens | None]:
        """Those of each piece of the batch, of so many samples."""
        if sizes not in self._pieces:
            lengths = iter(self.lengths)
            cut = [list(itertools.islice(lengths, size)) for size in sizes]
            self._pieces[sizes] = [self.of(piece, self.width, self.index.device) for piece in cut]
        return self._pieces[sizes]

    def row(self, tensor: torch.Tensor) -> torch.Tensor:
        """The computed tokens of (B, T, ...) as (1, N, ...)."""
        tokens = tensor.flatten(0, 1)
        return (_Take.apply(tokens, self.index) if tensor.requires_grad else tokens.index_select(0, self.index))[None]

    def columns_of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The entries for the computed tokens' places, of a tensor that all samples share; its dimension ``dim`` has them."""
        known, place = self._known_of(tensor)
        if place not in known:
            known[place] = tensor.index_select(dim, self.columns)
        return known[place]

    def _known_of(self, tensor: torch.Tensor) -> tuple[dict[Any, Any], Any]:
        known = self._once.setdefault(tensor.untyped_storage(), {})
        return known, (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)

    def batch(self, row: torch.Tensor) -> torch.Tensor:
        """Of (1, N, ...) the batch (B, T, ...), with zeros for the tokens that weren't computed."""
        count = len(self.lengths) * self.width
        return _put(row[0], self.index, count).unflatten(0, (len(self.lengths), self.width))

    def hides_padding_alone(self, mask: torch.Tensor) -> bool:
        """Whether a mask (B or 1, 1, T, T), True or 0 where a token is seen, lets each real token see itself and all before
        it. Waits for the device where it isn't known from an earlier layer. A mask without data is taken to do so."""
        if isinstance(mask, FakeTensor) or mask.is_meta:
            return True
        known, place = self._known_of(mask)
        if place not in known:
            expected = torch.ones(self.width, self.width, dtype=torch.bool, device=mask.device).tril()
            differs = torch.zeros((), dtype=torch.bool, device=mask.device)
            for sample, count in zip(mask.expand(len(self.lengths), -1, -1, -1), self.lengths, strict=True):
                seen = sample[0, :count]
                differs |= ((seen if seen.dtype is torch.bool else seen == 0) != expected[:count]).any()
            known[place] = not bool(differs)
        return bool(known[place])

    def labelled(self, hidden: torch.Tensor, target: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of ``hidden`` (B x T, D) and ``target`` (B x T,) that have a label, if any has. Waits for the device."""
        if isinstance(target, FakeTensor) or target.is_meta:  # without data: no more rows than these have a label
            return hidden[: len(self.index)], target[: len(self.index)]
        index = (target != ignored).nonzero().flatten()
        return (_Take.apply(hidden, index), target[index]) if len(index) else (hidden, target)


class _Take(torch.autograd.Function):
    """Some rows. Torch's own way back adds them up by atomic operations, in case one was taken twice."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.index, ctx.count = index, len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _put(gradient, ctx.index, ctx.count), None


def _put(rows: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """Rows at their places among ``count``, and zeros at the others. Unlike ``index_copy_``, the graph holds no rows."""
    return rows.new_zeros(count, *rows.shape[1:]).index_put_((index,), rows)


def may_leave_padding_out(model: nn.Module, layers: Collection[str]) -> bool:
    """Whether nothing behind a sequence's end reaches its tokens in this model, whose layers have these names: it is a causal
    language model of transformers, or PEFT's model around one, all of whose layers stand in one list."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    kind = type(base)
    is_causal = kind.__name__.endswith("ForCausalLM") and kind.__module__.startswith("transformers.")
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return is_causal and not is_encoder_decoder and len({name.rpartition(".")[0] for name in layers}) == 1


def real_tokens(inputs: Mapping[str, Any]) -> RealTokens | None:
    """Those of a training forward that is called with ``inputs``, by name; None where all of the batch has to be computed. The
    batch has a mask (B, T) that ends each sample, labels (B, T) none of which asks for what follows the end, and nothing of
    another shape, of which a plan can't tell how much is real. Waits for the device, as transformers does."""
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    if not (isinstance(mask, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return None
    if mask.dim() != 2 or mask.device != labels.device or mask.shape[1] < 2:
        return None
    if any(isinstance(value, torch.Tensor) and value.dim() and value.shape != mask.shape for value in inputs.values()):
        return None
    is_real, has_label = mask != 0, labels != _IGNORED
    is_right = (is_real[:, 1:] <= is_real[:, :-1]).all()
    # What is computed for a token is compared with the next token's label; in a model that doesn't shift them, with its own.
    is_asked = (has_label & ~is_real).any() | (has_label[:, 1:] & ~is_real[:, :-1]).any()
    suits, *lengths = torch.cat([(is_right & ~is_asked)[None], is_real.sum(1)]).tolist()
    return RealTokens.of(lengths, mask.shape[1], mask.device) if suits else None

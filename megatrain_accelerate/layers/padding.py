"""Finds which tokens of a batch are padding, and whether layers and the loss may leave it out.

In a causal model the tokens after a sequence's end affect none of its own, and the loss only if labels ask for them. So layers
run on the other tokens alone (:mod:`.unpadded_layer`). Shapes: B samples of T tokens with their padding, N computed tokens,
which are the real ones and as much padding after them as makes N a multiple of 64.
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
"""Padding is left out if more than this share of a batch is saved, since gathering and scattering tokens takes time."""
_MULTIPLE = 64
"""The number of computed tokens is rounded up to a multiple of this. Products of other numbers of rows are slower."""
_IGNORED = -100
"""The label of tokens that the losses of transformers ignore."""


@dataclasses.dataclass(frozen=True, eq=False)
class RealTokens:
    """The tokens of a batch that are computed when padding is left out: the first ones of each sample."""

    lengths: tuple[int, ...]
    """Tokens of each sample without padding."""
    counts: tuple[int, ...]
    """Tokens of each sample that are computed: its length, and some padding to fill up :data:`_MULTIPLE`."""
    width: int
    """Tokens of each sample with its padding: T."""
    index: torch.Tensor
    """int64 (N,), on the device: indices of the computed tokens among all B x T."""
    columns: torch.Tensor
    """int64 (N,), on the device: indices of the computed tokens within their samples."""
    begins: torch.Tensor
    """int32 (B + 1,), on the device: the offset of each sample in the N tokens, then N."""
    span: torch.Tensor
    """An empty tensor of shape (max(counts), 0). A compiled graph reads its size."""
    _pieces: dict[tuple[int, ...], list[RealTokens | None]] = dataclasses.field(default_factory=dict)
    """Results of :meth:`of_pieces`, since all layers cut a batch alike."""
    _once: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    """Results for arguments that all layers share (masks, position embeddings), by storage and view of it."""

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> RealTokens | None:
        """The tokens to compute of samples of these lengths in a batch of this width. None if too little would be left out, no
        token is real, or padding doesn't suffice to fill up a multiple of 64."""
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
        """The tokens to compute of each piece of the batch, for pieces of these numbers of samples."""
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
        """The entries for the computed tokens, of a tensor that all samples share and whose dimension ``dim`` has size T."""
        known, place = self._known_of(tensor)
        if place not in known:
            known[place] = tensor.index_select(dim, self.columns)
        return known[place]

    def _known_of(self, tensor: torch.Tensor) -> tuple[dict[Any, Any], Any]:
        known = self._once.setdefault(tensor.untyped_storage(), {})
        return known, (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)

    def batch(self, row: torch.Tensor) -> torch.Tensor:
        """The batch (B, T, ...) for a row (1, N, ...), with zeros for tokens that weren't computed."""
        count = len(self.lengths) * self.width
        return _put(row[0], self.index, count).unflatten(0, (len(self.lengths), self.width))

    def hides_padding_alone(self, mask: torch.Tensor) -> bool:
        """Whether a mask (B or 1, 1, T, T), True or 0 where a token is seen, lets each real token see itself and all earlier
        ones, but no others. Waits for the device unless an earlier layer had this mask. A fake mask is taken to do so."""
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
        """The rows of ``hidden`` (B x T, D) and ``target`` (B x T,) with a label, or all without any. Waits for the device."""
        if isinstance(target, FakeTensor) or target.is_meta:  # at most as many rows have a label as are computed
            return hidden[: len(self.index)], target[: len(self.index)]
        index = (target != ignored).nonzero().flatten()
        return (_Take.apply(hidden, index), target[index]) if len(index) else (hidden, target)


class _Take(torch.autograd.Function):
    """Selects rows. Torch's own backward would add gradients by atomic operations, in case a row was selected twice."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.index, ctx.count = index, len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _put(gradient, ctx.index, ctx.count), None


def _put(rows: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` rows: the given ones at their indices, and zeros elsewhere. Unlike ``index_copy_`` it saves no rows."""
    return rows.new_zeros(count, *rows.shape[1:]).index_put_((index,), rows)


def may_leave_padding_out(model: nn.Module, layers: Collection[str]) -> bool:
    """Whether tokens after a sequence's end can't affect its own in this model, whose layers have these names. That is so in a
    causal language model of transformers, also within a PEFT model, if one list holds all its layers."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    kind = type(base)
    is_causal = kind.__name__.endswith("ForCausalLM") and kind.__module__.startswith("transformers.")
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return is_causal and not is_encoder_decoder and len({name.rpartition(".")[0] for name in layers}) == 1


def real_tokens(inputs: Mapping[str, Any]) -> RealTokens | None:
    """The tokens to compute in a training forward with these ``inputs`` (by name), or None if that is the whole batch. Padding
    is left out if a mask (B, T) has it on the right, no label (B, T) needs it, and no tensor has another shape, of which a
    plan can't tell how much is real. Waits for the device, as transformers does."""
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    if not (isinstance(mask, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return None
    if mask.dim() != 2 or mask.device != labels.device or mask.shape[1] < 2:
        return None
    if any(isinstance(value, torch.Tensor) and value.dim() and value.shape != mask.shape for value in inputs.values()):
        return None
    is_real, has_label = mask != 0, labels != _IGNORED
    is_right = (is_real[:, 1:] <= is_real[:, :-1]).all()
    # A token's output is compared with the label of the next one, or in a model that doesn't shift labels with its own.
    is_asked = (has_label & ~is_real).any() | (has_label[:, 1:] & ~is_real[:, :-1]).any()
    suits, *lengths = torch.cat([(is_right & ~is_asked)[None], is_real.sum(1)]).tolist()
    return RealTokens.of(lengths, mask.shape[1], mask.device) if suits else None

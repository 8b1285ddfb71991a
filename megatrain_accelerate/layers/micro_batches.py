"""A layer's call in pieces of its batch: the layer is fetched once and serves all of them.

What holds a whole batch is cut along dimension 0, what all samples share goes to every piece; anything else is refused. How
many samples there are is known from the model's own inputs: hidden states with something else in dimension 0 aren't cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.nested_tensors import Args, Kwargs, taken_apart, tensors_in


class BatchCut:
    """How the layers of a model cut their calls into pieces. One object per engine."""

    def __init__(self, asked: int | None) -> None:
        self.asked = asked
        """Samples of a piece, as a setting or a joined step wants it; None: no need to cut. A batch that can't be cut is an
        error then."""
        self.chosen: int | None = None
        """Samples of a piece by the plan's choice, fewer than are asked for; a batch that can't be cut stays whole."""
        self._rows: frozenset[int] = frozenset()
        self._cut_before: dict[tuple[str, str], bool] = {}

    @property
    def size(self) -> int | None:
        """Samples of a piece; None for the whole batch."""
        return self.asked if self.chosen is None else self.chosen

    def begin(self, inputs: Any) -> None:
        """A forward of the model begins. Tensors in ``inputs`` of two dimensions or more have the samples along the first."""
        self._rows = rows_of(inputs)

    def require_samples(self, layer: StreamedLayer, path: str, hidden: torch.Tensor) -> None:
        """Raises an UnsupportedError unless dimension 0 is surely the batch, of which the layer can take a part."""
        shape, rows = tuple(hidden.shape), ", ".join(map(str, sorted(self._rows))) or "no"
        if hidden.dim() < 3:
            raise _cannot(layer.name, f"its hidden states have shape {shape}, in which samples can't be told apart")
        if shape[0] not in self._rows:
            raise _cannot(
                layer.name,
                f"its hidden states have shape {shape}, but the tensors that the model was called with have {rows} rows: "
                "dimension 0 isn't the batch",
            )
        if shape[1] in self._rows and (layer.name, path) not in self._cut_before:
            raise _cannot(
                layer.name,
                f"its hidden states have shape {shape}, and the tensors that the model was called with have {rows} rows, so "
                "that either dimension may be the batch, in the first batch that is to be cut",
            )
        for name, module in layer.module.named_modules():
            if getattr(module, "batch_first", True) is False:
                what = name or type(module).__name__
                raise _cannot(layer.name, f"its {what} has batch_first=False, and takes tokens first")
            if isinstance(module, _BatchNorm) and module.training:
                raise _cannot(layer.name, f"its {name} takes statistics of the whole batch")

    def is_cut(self, layer: StreamedLayer, path: str, tensor: torch.Tensor, hidden: torch.Tensor) -> bool:
        """Whether an argument is cut and not whole in all pieces. An UnsupportedError if unsure."""
        batch, length = hidden.shape[:2]
        place = (layer.name, path)
        if tensor is not hidden:
            if tensor.dim() == 0 or tensor.shape[0] == 1 or "'cache_position'" in path:
                return False
            if tensor.dim() == 1 and tensor.shape[0] == length != batch:  # one number a token
                self._cut_before[place] = False
            # One bias for each head looks like this too: (heads, 1 or T, T).
            is_bias = tensor.is_floating_point() and tensor.shape[2:] == (length,) and tensor.shape[1] in (1, length)
            is_batch = tensor.shape[0] == batch and (tensor.dim() == 1 or tensor.shape[1] != batch)
            # Nobody asked for pieces: what isn't surely a mask, positions or states of the samples' tokens leaves them whole.
            is_of_tokens = tensor.dim() > 1 and tensor.shape[1] in (1, length)
            if not is_batch or is_bias or batch == length or (self.asked is None and not is_of_tokens):
                # As in calls where it could be told.
                if place in self._cut_before and tensor.shape[0] in (batch, length):
                    return self._cut_before[place]
                raise _cannot(
                    layer.name,
                    f"argument {path} has shape {tuple(tensor.shape)} beside hidden states of shape {tuple(hidden.shape)}, "
                    "and it isn't certain which of its dimensions is the batch",
                )
        self._cut_before[place] = True
        return True


def rows_of(inputs: Any) -> frozenset[int]:
    """The lengths of dimension 0 of a batch's tensors of two dimensions or more: one of them is the number of samples."""
    return frozenset(tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim() >= 2)


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How the tensors of one call are cut."""

    sizes: tuple[int, ...]
    """Samples of each piece, in order; the last may be smaller. Empty for a call that isn't cut."""
    is_split: tuple[bool, ...]
    """For each tensor among the arguments: cut along dimension 0, or whole for every piece."""

    @property
    def count(self) -> int:
        return max(1, len(self.sizes))

    @classmethod
    def of_call(cls, layer: StreamedLayer, args: Args, kwargs: Kwargs, cut: BatchCut) -> BatchSplit:
        """The split of a layer's call. An UnsupportedError if it isn't certain how to cut a larger batch or some argument. The
        batch is dimension 0 of the call's first floating tensor of two dimensions or more, the hidden states (B, T, ...)."""
        if cut.size is None:  # asked first: every call of a layer comes here
            return _WHOLE
        if not (layer.has_trainable or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))):
            return _WHOLE  # without a graph it takes little memory
        paths = tree_flatten_with_path((args, kwargs))[0]
        tensors = [(keystr(path), leaf) for path, leaf in paths if isinstance(leaf, torch.Tensor)]
        found = next(((path, leaf) for path, leaf in tensors if leaf.is_floating_point() and leaf.dim() >= 2), None)
        if found is None or found[1].shape[0] <= cut.size:
            return _WHOLE
        batch = found[1].shape[0]
        try:
            cut.require_samples(layer, *found)
            for at, leaf in paths:
                held = () if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {}).values()
                if any(isinstance(item, torch.Tensor) for item in held):
                    raise _cannot(layer.name, f"argument {keystr(at)} is a {type(leaf).__name__}, whose tensors can't be cut")
            is_split = tuple(cut.is_cut(layer, name, leaf, found[1]) for name, leaf in tensors)
        except UnsupportedError:
            if cut.asked is not None and batch > cut.asked:
                raise
            return _WHOLE
        return cls(tuple(min(cut.size, batch - begin) for begin in range(0, batch, cut.size)), is_split)

    def arguments(self, args: Args, kwargs: Kwargs) -> list[tuple[Args, Kwargs]]:
        """The arguments of each piece, in autograd's graph; a tensor that is passed twice stays one."""
        tensors, put_together = taken_apart((args, kwargs))
        of_tensor: dict[tuple[int, bool], Sequence[torch.Tensor]] = {}
        columns = []
        for tensor, is_split in zip(tensors, self.is_split, strict=True):
            if (key := (id(tensor), is_split)) not in of_tensor and is_split:
                # One node for all: each slice's would make a gradient as large as the batch.
                of_tensor[key] = tensor.split(self.sizes)
            elif key not in of_tensor:
                whole = (tensor,) * self.count
                of_tensor[key] = _Shared.apply(tensor, self.count) if tensor.requires_grad else whole
            columns.append(of_tensor[key])
        return [put_together(piece) for piece in zip(*columns, strict=True)]

    def first_piece(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The call's arguments with the tensors of the first piece, which no other is larger than."""
        return self.arguments(args, kwargs)[0] if self.sizes else (args, kwargs)

    def whole(self, layer: str, made: tuple[Any, Any]) -> Any:
        """What a call returns and records, as zeros, from that of its first piece. Raises as :meth:`joined`."""
        if not self.sizes:
            return made
        self._require_samples(layer, self.sizes[0], tensors_in(made), len(tensors_in(made[0])))
        total, first = sum(self.sizes), self.sizes[0]
        return tree_map_only(torch.Tensor, lambda t: t.new_zeros((len(t) * total // first, *t.shape[1:])), made)

    @staticmethod
    def _require_samples(layer: str, size: int, made: Sequence[torch.Tensor], outputs: int) -> None:
        for place, tensor in enumerate(made):
            if tensor.dim() == 0 or (place < outputs and tensor.shape[0] != size):
                raise _cannot(layer, f"a piece of {size} samples returns a tensor of shape {tuple(tensor.shape)}")

    def joined(self, layer: str, pieces: Sequence[list[torch.Tensor]], outputs: int) -> list[torch.Tensor]:
        """What a call returns from what its pieces return: samples, or for recorded tensors the tokens of samples, in order.
        The first ``outputs`` of each piece's tensors were returned, the rest recorded. An UnsupportedError where one doesn't
        have the piece's samples along dimension 0."""
        for size, piece in zip(self.sizes, pieces, strict=True):
            self._require_samples(layer, size, piece, outputs)
        return [torch.cat(column) for column in zip(*pieces, strict=True)]


_WHOLE = BatchSplit((), ())


class _Shared(torch.autograd.Function):
    """A tensor for several pieces, whose gradients are summed in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found = [gradient for gradient in gradients if gradient is not None]
        if not found:
            return None, None
        total = found[0].float()
        for gradient in found[1:]:
            total = total + gradient
        return total.to(found[0].dtype), None


def _cannot(layer: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"megatrain_config.micro_batch_size can't cut the batch of layer {layer}: {reason}. Leave micro_batch_size unset and "
        "lower per_device_train_batch_size, raising gradient_accumulation_steps instead"
    )

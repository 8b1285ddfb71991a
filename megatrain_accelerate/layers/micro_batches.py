"""Runs a layer on pieces of its batch. The layer is fetched once for all of them.

Tensors of the whole batch are cut along dimension 0, and those that all samples share go to every piece. Any other tensor is
refused. The model's own inputs tell the number of samples: hidden states with another size in dimension 0 aren't cut.
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
    """Decides how the layers of a model cut their calls into pieces. One object per engine."""

    def __init__(self, asked: int | None) -> None:
        self.asked = asked
        """Samples of a piece that a setting or joined step asks for, or None. A larger batch that can't be cut is an error."""
        self.chosen: int | None = None
        """Samples of a piece by the plan's choice, fewer than ``asked``. Without ``asked`` what can't be cut stays whole."""
        self._rows: frozenset[int] = frozenset()
        self._cut_before: dict[tuple[str, str], bool] = {}

    @property
    def size(self) -> int | None:
        """Samples of a piece, or None for the whole batch."""
        return self.asked if self.chosen is None else self.chosen

    def begin(self, inputs: Any) -> None:
        """Notes the inputs of a forward of the model that begins. See :func:`rows_of`."""
        self._rows = rows_of(inputs)

    def require_samples(self, layer: StreamedLayer, path: str, hidden: torch.Tensor) -> None:
        """Raises an UnsupportedError unless dimension 0 of ``hidden`` is surely the batch and the layer can run on a piece."""
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
                raise _cannot(layer.name, f"its {what} has batch_first=False, so that dimension 0 is tokens and not samples")
            if isinstance(module, _BatchNorm) and module.training:
                raise _cannot(
                    layer.name, f"its {name} is a batch norm in training mode, whose statistics need the whole batch"
                )

    def is_cut(self, layer: StreamedLayer, path: str, tensor: torch.Tensor, hidden: torch.Tensor) -> bool:
        """Whether an argument is cut, rather than passed whole to all pieces. Raises an UnsupportedError if that is unsure."""
        batch, length = hidden.shape[:2]
        place = (layer.name, path)
        if tensor is not hidden:
            if tensor.dim() == 0 or tensor.shape[0] == 1 or "'cache_position'" in path:
                return False
            if tensor.dim() == 1 and tensor.shape[0] == length != batch:  # one number for each token
                self._cut_before[place] = False
            # A bias for each head may have such a shape, too: (heads, 1 or T, T).
            is_bias = tensor.is_floating_point() and tensor.shape[2:] == (length,) and tensor.shape[1] in (1, length)
            is_batch = tensor.shape[0] == batch and (tensor.dim() == 1 or tensor.shape[1] != batch)
            # Where only the plan wants pieces, arguments must surely be masks, positions or states of the samples' tokens.
            is_of_tokens = tensor.dim() > 1 and tensor.shape[1] in (1, length)
            if not is_batch or is_bias or batch == length or (self.asked is None and not is_of_tokens):
                # Earlier calls may have had shapes that left no doubt.
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
    """The sizes of dimension 0 of a batch's tensors of at least two dimensions. One of them is the number of samples."""
    return frozenset(tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim() >= 2)


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How the tensors of one call are cut into pieces."""

    sizes: tuple[int, ...]
    """Samples of each piece, in order. The last may be smaller. Empty for a call that isn't cut."""
    is_split: tuple[bool, ...]
    """Whether each tensor among the arguments is cut along dimension 0, rather than passed whole to every piece."""

    @property
    def count(self) -> int:
        return max(1, len(self.sizes))

    @classmethod
    def of_call(cls, layer: StreamedLayer, args: Args, kwargs: Kwargs, cut: BatchCut) -> BatchSplit:
        """The split of a layer's call. Its hidden states (B, T, ...) are its first floating-point tensor of at least two
        dimensions. Raises an UnsupportedError if more than ``cut.asked`` samples can't be cut for certain."""
        if cut.size is None:  # checked first, since every call of a layer comes here
            return _WHOLE
        if not (layer.has_trainable or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))):
            return _WHOLE  # a call without a graph takes little memory
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
        """The arguments of each piece, in autograd's graph. A tensor that is passed twice stays one tensor."""
        tensors, put_together = taken_apart((args, kwargs))
        of_tensor: dict[tuple[int, bool], Sequence[torch.Tensor]] = {}
        columns = []
        for tensor, is_split in zip(tensors, self.is_split, strict=True):
            if (key := (id(tensor), is_split)) not in of_tensor and is_split:
                # One node for all pieces: the node of each slice would make a gradient as large as the batch.
                of_tensor[key] = tensor.split(self.sizes)
            elif key not in of_tensor:
                whole = (tensor,) * self.count
                of_tensor[key] = _Shared.apply(tensor, self.count) if tensor.requires_grad else whole
            columns.append(of_tensor[key])
        return [put_together(piece) for piece in zip(*columns, strict=True)]

    def first_piece(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments of the first piece, which is the largest, or those of a call that isn't cut."""
        return self.arguments(args, kwargs)[0] if self.sizes else (args, kwargs)

    def whole(self, layer: str, made: tuple[Any, Any]) -> Any:
        """Zeros in the shapes of what a call returns and records, if ``made`` is that of its first piece. Returns ``made`` for
        a call that isn't cut. Raises what :meth:`joined` raises."""
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
        """Concatenates the tensors of a call's pieces. The first ``outputs`` of each piece were returned, and have its samples
        along dimension 0, else this raises an UnsupportedError. The rest were recorded, and have the tokens of its samples."""
        for size, piece in zip(self.sizes, pieces, strict=True):
            self._require_samples(layer, size, piece, outputs)
        return [torch.cat(column) for column in zip(*pieces, strict=True)]


_WHOLE = BatchSplit((), ())


class _Shared(torch.autograd.Function):
    """Passes one tensor to several pieces, sums their gradients in fp32 and rounds once."""

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

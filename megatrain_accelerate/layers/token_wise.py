"""Which modules treat every token alone: tried out on a few tokens, so that no model has to be known by name.

A token that isn't a number spoils whatever is computed from it: sums, products and softmaxes pass NaN on whatever the
weights are. If one spoilt token spoils no other, and some tokens alone give what they give among others, then a module may
run on one part of a sequence after the other. Decisions (which expert, which tokens are dropped) pass no NaN on, and random
numbers would be others: modules with either aren't taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatrain_accelerate.layers.ambient_state import parameters_as, random_numbers_put_back
from megatrain_accelerate.layers.nested_tensors import tensors_in

_TOKENS = 8
_SPOILT = (0, 3, 7)
"""The first, an inner and the last one: what looks back, ahead or to all sides would pass one of them on."""
_PART = (2, 3)
"""First of the tokens that run alone, and their number."""
_MIXING = ("convolution", "_pad", "roll", "shift", "_pool", "fft", "flip", "unfold", "im2col", "upsample", "cumsum", "cumprod")
"""In operations' names: those that combine tokens at places that they are told."""
_WEIGHT = 0.01
"""In the place of every weight; which number it is doesn't matter for what depends on what."""
_TOLERANCE = 0.02
"""Between tokens alone and among others, relative to the largest: kernels for other sizes round otherwise, in bf16 by 0.4%."""
WORTH_TILING = 2.5
"""What a module makes on its way, in sizes of its output, below which its tiles would save nothing: a product is 1, with a
bias 2 at most."""
MAKES_LITTLE = "it makes little besides its output"
"""Why a module that treats every token alone isn't to run by tiles."""


def kind_of(module: nn.Module, signature: Hashable) -> Hashable:
    """What two modules must share to be judged once: code, weights' shapes, plain attributes, and how they are called."""
    parts = []
    for child in module.modules():
        plain = [
            (name, value if isinstance(value, (bool, int, float, str)) else getattr(value, "__qualname__", ""))
            for name, value in sorted(child.__dict__.items())
            if isinstance(value, (bool, int, float, str)) or callable(value)
        ]
        shapes = [(name, tuple(p.shape), p.dtype) for name, p in child._parameters.items() if p is not None]
        parts.append((type(child), tuple(plain), tuple(shapes), tuple(child._modules)))
    return (tuple(parts), signature)


def examine(
    module: nn.Module, call: Callable[[list[torch.Tensor]], Any], examples: Sequence[torch.Tensor], dim: int
) -> str | None:
    """Tries a module on a few made-up tokens along ``dim``; returns why it isn't to run by tiles, else None.

    A constant replaces its weights, random generators stay as they are, and no mode sees it. ``call`` runs it with other
    tensors in the places of the ``examples`` of a real call, of which only shapes, dtypes and the device count.
    """
    if any(True for _ in module.buffers()):
        return "it has buffers"
    device = examples[0].device
    if device.type == "cuda" and not torch.cuda.is_available():
        device = torch.device("cpu")
    # A part that draws random numbers draws them here too: the forward that asks must find them again in its recompute.
    with random_numbers_put_back(device), _disable_current_modes(), torch.no_grad():
        try:
            found = [(owner, name, p) for owner in module.modules() for name, p in owner._parameters.items() if p is not None]
            constants = [torch.full((), _WEIGHT, dtype=p.dtype, device=device).expand(p.shape) for _, _, p in found]
            with parameters_as([(owner, name) for owner, name, _ in found], constants):
                return _examine(call, [_made_up(example, dim, device) for example in examples], dim)
        except Exception as error:  # it can't be run so, whatever its reason
            return f"it can't be tried out ({type(error).__name__}: {str(error)[:80]})"


def _examine(call: Callable[[list[torch.Tensor]], Any], inputs: list[torch.Tensor], dim: int) -> str | None:
    versions = [tensor._version for tensor in inputs]
    with _Watch() as watch:
        whole = call(inputs)
    if watch.decision is not None:
        return watch.decision
    if not isinstance(whole, torch.Tensor) or whole.dim() <= dim or whole.shape[: dim + 1] != inputs[0].shape[: dim + 1]:
        return "it doesn't return one tensor of a row for each token"
    if versions != [tensor._version for tensor in inputs]:
        return "it writes to its inputs"
    if not whole.is_floating_point() or not bool(whole.isfinite().all()):
        return "it returns other than finite numbers for made-up tokens"
    for token in _SPOILT:
        spoilt = [tensor.clone() for tensor in inputs]
        for tensor in spoilt:
            tensor.select(dim, token).fill_(float("nan"))
        others = [place for place in range(_TOKENS) if place != token]
        found = call(spoilt).index_select(dim, torch.tensor(others, device=whole.device))
        if bool(found.isnan().any()):
            return "a token's output depends on other tokens"
    alone = call([_part(tensor, dim) for tensor in inputs])
    expected = _part(whole, dim)
    if alone.shape != expected.shape:
        return "it doesn't return one tensor of a row for each token"
    if float((alone - expected).abs().max()) > _TOLERANCE * float(expected.abs().max()):
        return "a token's output depends on its place"
    if watch.made_bytes < WORTH_TILING * whole.nbytes:
        return MAKES_LITTLE
    return None


class _Watch(TorchDispatchMode):
    """Adds up what is made, and notes operations that decide by values or draw random numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.made_bytes = 0
        self.decision: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs))
        made = tensors_in(result)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        self.made_bytes += sum(tensor.nbytes for tensor in made if tensor.untyped_storage()._cdata not in known)
        # Whole numbers from others: which is largest, how many, where.
        is_whole = [[not t.is_floating_point() and t.dtype != torch.bool for t in tensors] for tensors in (made, given)]
        counts = any(is_whole[0]) and not all(is_whole[1])
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.decision = "it draws random numbers"
        elif func is torch.ops.aten._local_scalar_dense.default or counts:
            self.decision = "it decides by values"
        elif any(word in str(func) for word in _MIXING):
            self.decision = "it takes from neighbours"  # further away, maybe, than the tokens tried out reach
        return result


def _made_up(example: torch.Tensor, dim: int, device: torch.device) -> torch.Tensor:
    shape = (*(() if dim == 0 else (1, *example.shape[1:dim])), _TOKENS, *example.shape[dim + 1 :])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, example.dtype)


def _part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.narrow(dim, *_PART).contiguous()

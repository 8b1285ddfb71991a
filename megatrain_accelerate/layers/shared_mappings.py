"""Mappings by which layers pass tensors to later ones besides their outputs (shared keys and values of Gemma 3n and 4).

The model passes one mapping to all layers. Some write entries, later ones read them. Each run of a layer, also a recompute,
gets its own copy. After the forward its changes are applied to the model's mapping. Transformers uses ``UserDict`` here, since
wrappers that rebuild plain dicts would lose what layers write.
"""

from __future__ import annotations

import contextlib
import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers.nested_tensors import Args, Kwargs, taken_apart, tensors_in


class _Handed(NamedTuple):
    """A copy of a mapping as an argument of a layer. Pytree finds the tensors in it."""

    entries: dict[Any, Any]


class _Returned(NamedTuple):
    """A layer's output, and the entries of each mapping that was passed to it, with ``...`` for unchanged ones."""

    output: Any
    entries: tuple[dict[Any, Any], ...]


@functools.cache
def _is_mapping(kind: type) -> bool:
    return issubclass(kind, (UserDict, _Handed))


def has_mappings(args: Args, kwargs: Kwargs) -> bool:
    """Whether a layer's arguments include mappings of the model or copies of them."""
    return any(map(_is_mapping, map(type, (*args, *kwargs.values()))))


def with_copies(run: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Calls ``run(args, kwargs)``, which ends in :func:`run_with_mappings`, with copies of the mappings that pytree may
    rebuild. Applies the layer's changes to the model's mappings, and returns the layer's own output."""
    if not has_mappings(args, kwargs):
        return run(args, kwargs)
    mappings, put_together = taken_apart((args, kwargs), UserDict)
    result = run(*put_together([_Handed(dict(mapping)) for mapping in mappings]))
    for mapping, entries in zip(mappings, result.entries, strict=True):
        now = {key: mapping[key] if entry is ... else entry for key, entry in entries.items()}
        mapping.clear()
        mapping.update(now)
    return result.output


def run_with_mappings(forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Calls a layer's own forward. If mappings were passed to it, :func:`with_copies` unpacks the result."""
    if _Handed not in map(type, (*args, *kwargs.values())):
        return forward(*args, **kwargs)
    handed, put_together = taken_apart((args, kwargs), _Handed)
    mappings = [UserDict(copy.entries) for copy in handed]
    args, kwargs = put_together(mappings)
    output = forward(*args, **kwargs)
    pairs = zip(mappings, (copy.entries for copy in handed), strict=True)
    return _Returned(output, tuple({k: ... if k in was and v is was[k] else v for k, v in now.items()} for now, was in pairs))


@contextlib.contextmanager
def no_writes_into(args: Args, kwargs: Kwargs, layer: str) -> Iterator[None]:
    """Raises an UnsupportedError if a layer changes lists, dicts or objects among its arguments in the block: a recompute
    would change them again, and changes by pieces of a batch can't be joined."""
    leaves, structure = tree_flatten((args, kwargs))
    objects = [o for o in leaves if hasattr(o, "__dict__") and not isinstance(o, (torch.Tensor, nn.Module, type))]
    held = [_held_tensors(value) for value in objects]
    yield
    changed = [type(o).__name__ for o, before in zip(objects, held, strict=True) if _held_tensors(o) != before]
    leaves_now, structure_now = tree_flatten((args, kwargs))
    if structure_now != structure or list(map(id, leaves_now)) != list(map(id, leaves)):
        changed.append("list or dict")
    if changed:
        raise UnsupportedError(
            f"layer {layer} writes into an argument ({', '.join(changed)}); the change would be lost for other layers and "
            "have no gradient. Set megatrain_config.layer_classes to larger blocks that contain both the layers that write "
            "and those that read it; a model without such blocks can't be trained with megatrain yet"
        )


def _held_tensors(value: Any) -> list[int]:
    return [id(tensor) for tensor in tensors_in(vars(value))]


@contextlib.contextmanager
def no_writes_to(
    tensors: Sequence[torch.Tensor], layer: str, torch_refuses: str = "leaf Variable that requires grad"
) -> Iterator[None]:
    """Raises an UnsupportedError if a layer writes to its input tensors in place in the block. ``torch_refuses`` is part of
    the message with which torch itself refuses such a write to the tensors or to their views."""
    versions = [tensor._version for tensor in tensors]
    cause: RuntimeError | None = None
    try:
        yield
    except RuntimeError as error:
        if torch_refuses not in str(error):
            raise
        cause = error
    if cause is not None or versions != [tensor._version for tensor in tensors]:
        raise UnsupportedError(
            f"layer {layer} writes to its inputs in place, so that it can't be run again from them in backward; name "
            "other layers in megatrain_config.layer_classes"
        ) from cause

"""Mappings through which layers hand tensors to each other besides their outputs (shared keys and values of Gemma 3n and 4).

The model passes one mapping to all layers; some write entries, later ones read them. A layer gets one of its own, also when
it is computed again, and what it wrote there in forward is entered into the model's after the call.
Transformers uses ``collections.UserDict`` for these, since wrappers that rebuild every plain dict would lose what is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import MappingKey, register_pytree_node, tree_flatten, tree_leaves

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.streaming.nested_tensors import tensors_in


@dataclasses.dataclass
class _Handed:
    """A mapping on its way into a layer: its entries, which pytree sees."""

    entries: dict[Any, Any]


@dataclasses.dataclass
class _Returned:
    """What a layer returned, and for each mapping that was handed to it the entries that it wrote and the keys that it
    removed."""

    output: Any
    written: tuple[dict[Any, Any], ...]
    removed: tuple[Any, ...]


register_pytree_node(
    _Handed,
    lambda handed: (list(handed.entries.values()), tuple(handed.entries)),
    lambda values, keys: _Handed(dict(zip(keys, values, strict=True))),
    flatten_with_keys_fn=lambda handed: (
        [(MappingKey(key), value) for key, value in handed.entries.items()],
        tuple(handed.entries),
    ),
)
register_pytree_node(
    _Returned,
    lambda returned: ([returned.output, returned.written], returned.removed),
    lambda children, removed: _Returned(*children, removed),  # type: ignore[call-arg]
)


class SharedMappings:
    """The mappings among one call's arguments.

    Args:
        args, kwargs: the call's, as the model passes them.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._mappings = [value for value in (*args, *kwargs.values()) if isinstance(value, UserDict)]
        if self._mappings:
            args = tuple(_handed(value) for value in args)
            kwargs = {name: _handed(value) for name, value in kwargs.items()}
        self.args = args
        """The arguments for :func:`run_with_mappings`, directly or by way of pytree."""
        self.kwargs = kwargs

    def take_back(self, result: Any) -> Any:
        """Brings the model's mappings to what the layer made of them; returns the layer's own output."""
        if not self._mappings:
            return result
        for mapping, written, removed in zip(self._mappings, result.written, result.removed, strict=True):
            mapping.update(written)
            for key in removed:
                del mapping[key]
        return result.output


def run_with_mappings(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a layer's own forward; for :meth:`SharedMappings.take_back` if mappings were handed to it."""
    handed = [value for value in (*args, *kwargs.values()) if isinstance(value, _Handed)]
    if not handed:
        return forward(*args, **kwargs)
    mappings = [UserDict(value.entries) for value in handed]
    unused = iter(mappings)
    args = tuple(next(unused) if isinstance(value, _Handed) else value for value in args)
    kwargs = {name: next(unused) if isinstance(value, _Handed) else value for name, value in kwargs.items()}
    output = forward(*args, **kwargs)
    removed = tuple(value.entries.keys() - mapping.keys() for mapping, value in zip(mappings, handed, strict=True))
    written = tuple(
        {key: entry for key, entry in mapping.items() if entry is not value.entries.get(key)}
        for mapping, value in zip(mappings, handed, strict=True)
    )
    return _Returned(output, written, removed)


def takes_mappings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether mappings were handed over among these arguments."""
    return any(isinstance(value, _Handed) for value in (*args, *kwargs.values()))


def _handed(value: Any) -> Any:
    return _Handed(dict(value)) if isinstance(value, UserDict) else value


@contextlib.contextmanager
def no_writes_into(args: tuple[Any, ...], kwargs: dict[str, Any], layer: str) -> Iterator[None]:
    """Refuses a layer whose run in the body puts something into lists, dicts or objects among its arguments: a recompute
    would do so again, and what a piece of a batch puts there can't be joined.

    Args:
        args, kwargs: as the layer gets them.
        layer: its name, for the message.

    Raises:
        UnsupportedError: it does.
    """
    contents = _contents((args, kwargs))
    objects = [o for o in tree_leaves((args, kwargs)) if hasattr(o, "__dict__") and not isinstance(o, _NOT_LOOKED_INTO)]
    held = [_held_tensors(value) for value in objects]
    yield
    changed = [type(o).__name__ for o, before in zip(objects, held, strict=True) if _held_tensors(o) != before]
    if _contents((args, kwargs)) != contents:
        changed.append("list or dict")
    if changed:
        raise UnsupportedError(
            f"layer {layer} writes into an argument ({', '.join(changed)}), which other layers wouldn't see and "
            "gradients couldn't pass. A model whose layers hand tensors on in this way can't be trained with megatrain "
            "yet; name other layers in megatrain_config.layer_classes if larger blocks keep it to themselves"
        )


_NOT_LOOKED_INTO = (torch.Tensor, nn.Module, type)


def _contents(arguments: Any) -> tuple[list[int], Any]:
    leaves, structure = tree_flatten(arguments)
    return [id(leaf) for leaf in leaves], structure


def _held_tensors(value: Any) -> list[int]:
    return [id(tensor) for tensor in tensors_in(vars(value))]


@contextlib.contextmanager
def no_writes_to(
    tensors: Sequence[torch.Tensor], layer: str, torch_refuses: str = "leaf Variable that requires grad"
) -> Iterator[None]:
    """Refuses a layer whose run in the body writes to its inputs.

    Args:
        tensors: the inputs.
        layer: its name, for the message.
        torch_refuses: what torch's own error says about a write to what the layer gets of them.

    Raises:
        UnsupportedError: it does.
    """
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

"""Finds tensors within arguments and results: in tuples, lists, dicts and dataclasses, but not in other objects."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""Positional and keyword arguments of a call."""
Inputs = Mapping[str, Any]
"""Arguments of a model's forward by name."""

_HOLD_NOTHING = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def map_tensors(change: Callable[[Any], Any], value: Any, kind: type | tuple[type, ...] = torch.Tensor) -> Any:
    """Replaces each tensor (or object of ``kind``), in order, by ``change(it)``. Unchanged containers keep their identity."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [item if type(item) in _HOLD_NOTHING else map_tensors(change, item, kind) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    is_dict = isinstance(value, dict)
    if not is_dict and not hasattr(type(value), "__dataclass_fields__"):
        return value
    held = value if is_dict else {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    found = [(key, item) for key, item in held.items() if type(item) not in _HOLD_NOTHING]  # most of a layer's arguments
    changed = {key: new for key, item in found if (new := map_tensors(change, item, kind)) is not item}
    if changed:
        value = copy.copy(value)
        put = value.__setitem__ if is_dict else functools.partial(object.__setattr__, value)
        for key, item in changed.items():
            put(key, item)
    return value


class _Place(int):
    """Stands for the tensor with this index."""


def taken_apart(value: Any, kind: type = torch.Tensor) -> tuple[list[Any], Callable[[Any], Any]]:
    """The tensors (or objects of ``kind``) that :func:`map_tensors` finds, in order, and a function that puts others in their
    places. The function holds none of the tensors."""
    found: list[Any] = []

    def take(item: Any) -> _Place:
        found.append(item)
        return _Place(len(found) - 1)

    rest = map_tensors(take, value, kind)
    return found, lambda others: map_tensors(others.__getitem__, rest, _Place)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree (:mod:`torch.utils._pytree`), in order."""
    # Every operation of a fake run calls this, and torch's own traversal takes several times as long.
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        return [tree]
    if kind in _HOLD_NOTHING:
        return []
    if kind is not tuple and kind is not list and kind is not dict:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor for item in (tree.values() if kind is dict else tree) for tensor in tensors_in(item)]

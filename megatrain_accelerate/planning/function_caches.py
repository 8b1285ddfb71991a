"""Caches of functions (``functools.lru_cache``) that a model computes with: tables of positions, masks.

A run without data would leave tensors without data in them, which the next real forward would find.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_Cache = functools._lru_cache_wrapper
_NOT_OF_MODELS = ("torch", "builtins", "typing", "abc")


@contextlib.contextmanager
def caches_emptied_after(model: nn.Module) -> Iterator[None]:
    """Empties the caches to which the body added an entry, after it has run.

    Those that the code of the model's classes can name are looked at: decorated functions and methods in the Python modules
    that define them, also below transformers' ``compile_compatible_method_lru_cache``, and attributes of the model's modules.
    """
    caches = _caches_of(model)
    before = [cache.cache_info().misses for cache in caches]
    try:
        yield
    finally:
        for cache, misses in zip(caches, before, strict=True):
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _caches_of(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    seen: set[int] = set()
    for module in model.modules():
        for value in vars(module).values():
            _collect(value, "", found, seen)
    for name in {cls.__module__ for module in model.modules() for cls in type(module).__mro__}:
        if name.split(".")[0] not in _NOT_OF_MODELS and name in sys.modules:
            for value in list(vars(sys.modules[name]).values()):
                _collect(value, name, found, seen)
    return list(found.values())


def _collect(value: Any, home: str, found: dict[int, Any], seen: set[int]) -> None:
    """Adds the caches of a function, or of the methods of a class that is defined in the Python module ``home``."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    if id(value) in seen:
        return
    if isinstance(value, _Cache):
        found[id(value)] = value
    elif isinstance(value, types.FunctionType):
        seen.add(id(value))
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is still empty
                if isinstance(cell.cell_contents, (_Cache, types.FunctionType)):
                    _collect(cell.cell_contents, home, found, seen)
    elif isinstance(value, type) and value.__module__ == home:
        seen.add(id(value))
        for attribute in list(vars(value).values()):
            _collect(attribute, home, found, seen)

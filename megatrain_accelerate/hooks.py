"""The hooks that an engine hangs on its model's modules, whether others are there, and what is replaced for a while."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module that hold its hooks."""


class replaced:
    """The owner's attribute has this value while the body runs. A class, since a generator takes twice as long."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._name, self._before)


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Calls a bound method, with these ``first`` arguments, as long as its object and they live; a hook of a tensor, or of a
    node, through which the garbage collector doesn't see."""
    references = [weakref.WeakMethod(method), *map(weakref.ref, first)]

    def call(*args: Any) -> Any:
        alive = []
        for reference in references:
            if (found := reference()) is None:
                return None
            alive.append(found)
        return alive[0](*alive[1:], *args)

    return call


def has_global_hooks() -> bool:
    """Whether there are hooks that run on every module of the process."""
    return any(getattr(nn.modules.module, f"_global{name}", None) for name in HOOKS)


def has_hooks_inside(module: nn.Module) -> bool:
    """Whether hooks run inside the module (those on the module itself run outside of its forward)."""
    # Each call of a compiled layer asks, and ``modules()`` is slow.
    inner: list[nn.Module | None] = [*module._modules.values()]
    for child in inner:
        if child is not None:
            if any(getattr(child, name) for name in HOOKS):
                return True
            inner += child._modules.values()
    return has_global_hooks()


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model's forward as keyword arguments; none at all where some have no name (``*args``)."""
    if not args:
        return kwargs
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs} if len(args) <= len(names) else {}


def run_pre_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: set[int]) -> tuple[Any, Any]:
    """Runs the forward pre-hooks of ``module`` that were registered after its call began: all but those ``known``, by id.
    Returns the arguments as the hooks leave them."""
    for number, hook in [item for item in module._forward_pre_hooks.items() if item[0] not in known]:
        if number in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        elif (result := hook(module, args)) is not None:
            args = result if isinstance(result, tuple) else (result,)
    return args, kwargs


class ModelHook:
    """Calls a function of the engine, if it has one; ``with_arguments``, those of the hook, whose result the function's is.
    Copies and pickles do nothing. ``runs_without_data``: it is part of what the model computes, and runs in fake runs too."""

    def __init__(
        self, function: Callable[..., Any] | None = None, with_arguments: bool = False, runs_without_data: bool = False
    ) -> None:
        self.function, self._with_arguments, self.runs_without_data = function, with_arguments, runs_without_data

    # A break in the graph of a model that somebody compiles as a whole, as transformers does where ``generate`` has a static
    # cache: slots, copies and versions aren't for a compiler to follow.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            return None
        return self.function(*args, **kwargs) if self._with_arguments else self.function()

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        if not self._with_arguments:
            # A module's hooks are copied before its children: they bring the weights up to date.
            self()
        return ModelHook, ()

"""Helpers for hooks on modules and tensors: an engine's hooks and those of others. Also attributes replaced for a while."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class replaced:
    """A context in which an attribute of ``owner`` has another value. ``contextmanager`` would take twice as long."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._name, self._before)


def weakly(method: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
    """A function that calls a method with ``bound`` before its own arguments, or returns None once the method's object or one
    of ``bound`` is gone. For hooks on tensors and autograd nodes, whose references the garbage collector doesn't see."""
    references = [weakref.WeakMethod(method), *map(weakref.ref, bound)]

    def call(*args: Any) -> Any:
        alive = []
        for reference in references:
            if (found := reference()) is None:
                return None
            alive.append(found)
        return alive[0](*alive[1:], *args)

    return call


def has_global_hooks() -> bool:
    """Whether hooks are registered that run on every module of the process."""
    return any(getattr(nn.modules.module, f"_global{name}", None) for name in HOOKS)


def has_hooks_inside(module: nn.Module) -> bool:
    """Whether hooks run inside the module's forward. Those on the module itself run outside of it."""
    # Each call of a compiled layer comes here, and ``modules()`` is slow.
    inner: list[nn.Module | None] = [*module._modules.values()]
    for child in inner:
        if child is not None:
            if any(getattr(child, name) for name in HOOKS):
                return True
            inner += child._modules.values()
    return has_global_hooks()


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of the model, by name. Empty, without ``kwargs`` too, if some have no name (``*args``)."""
    if not args:
        return kwargs
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs} if len(args) <= len(names) else {}


def run_pre_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: set[int]) -> tuple[Any, Any]:
    """Runs the forward pre-hooks that a new engine registered during the module's call, since torch doesn't: all whose keys
    aren't ``known``. Returns the arguments as the hooks leave them."""
    for key, hook in [item for item in module._forward_pre_hooks.items() if item[0] not in known]:
        if key in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        elif (result := hook(module, args)) is not None:
            args = result if isinstance(result, tuple) else (result,)
    return args, kwargs


class ModelHook:
    """A hook that calls a function of the engine unless :attr:`function` is None, ``with_arguments`` with those of the hook.
    ``runs_without_data``: the plan's fake runs, on tensors without data, call it, too. Copies of the hook do nothing."""

    def __init__(
        self, function: Callable[..., Any] | None = None, with_arguments: bool = False, runs_without_data: bool = False
    ) -> None:
        self.function, self._with_arguments, self.runs_without_data = function, with_arguments, runs_without_data

    # This breaks the graph of a model that is compiled as a whole, as transformers does for ``generate`` with a static cache:
    # a compiler can't trace slots, copies and versions.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            return None
        return self.function(*args, **kwargs) if self._with_arguments else self.function()

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        """Calls the function if it takes no arguments: it may bring weights up to date, and who copies or pickles a model
        comes here before the submodules' weights."""
        if not self._with_arguments:
            self()
        return ModelHook, ()

"""Proxies: layers of the user's model that keep names, attributes, children and class, but hold no weights.

A proxy's class is a subclass made here, and it has a ``forward`` of its own, the streaming runtime's. ``isinstance``,
``named_parameters()``, attribute reads and hooks work as before. Copies and pickles are plain modules of the original class.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

_RUNNER = "_megatrain_runner"
"""The attribute of a proxy with the ``forward`` that it was given."""
_BEFORE_COPY = "_megatrain_before_copy"
_CHECKPOINTING = "gradient_checkpointing"


class _NoCheckpointing:
    """Data descriptor for ``gradient_checkpointing``: the engine recomputes already, a second time would be waste.

    The flag of modules has this name in all releases of transformers, whatever the training arguments are called.
    """

    def __get__(self, instance: Any, owner: Any = None) -> bool:
        return False

    def __set__(self, instance: Any, value: bool) -> None:
        if value:
            _note_checkpointing_ignored()


warn_once = functools.cache(functools.partial(logger.warning, "megatrain: %s"))
"""Warns of a message once a process."""


def _note_checkpointing_ignored() -> None:
    warn_once(
        "layers are recomputed by the streaming engine; activation_checkpointing (gradient_checkpointing) is left off in them"
    )


def modules_that_checkpoint(model: nn.Module) -> weakref.WeakSet[nn.Module]:
    """Modules other than proxies that have a flag for activation checkpointing: around layers, and inside them."""
    return weakref.WeakSet(module for module in model.modules() if hasattr(module, _CHECKPOINTING) and not is_proxy(module))


def leave_checkpointing_off(modules: Iterable[nn.Module]) -> None:
    """Switches the flag of the modules off, and says so once where it was on."""
    for module in modules:
        if module.__dict__.get(_CHECKPOINTING):
            module.__dict__[_CHECKPOINTING] = False
            _note_checkpointing_ignored()


def _note_cast_ignored(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Says once that ``to(dtype)`` or the like was asked for and changes no layer."""
    first = next(module.parameters(), None)
    # fn is any of to(), half(), cuda(), ...: what it does to an empty tensor tells.
    if first is not None and fn(first.new_empty(0)).dtype != first.dtype:
        warn_once(
            "the dtype of a prepared model's layers isn't changed by to(), half() and the like; "
            "cast the model before accelerator.prepare()"
        )


def _new_module(original: type[nn.Module]) -> nn.Module:
    """An empty module, to be filled with a pickled or copied proxy's state."""
    return original.__new__(original)


@functools.cache
def _proxy_class(original: type[nn.Module], can_checkpoint: bool) -> type[nn.Module]:
    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # to(), cuda() and the like would bring the whole model to the GPU, and put rounded weights in the masters' place.
        _note_cast_ignored(self, fn)
        return self

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        self.__dict__[_BEFORE_COPY]()
        reduced: Any = object.__reduce_ex__(self, protocol)
        own = (self.__dict__[_RUNNER], self.__dict__[_BEFORE_COPY])
        state = {key: value for key, value in reduced[2].items() if not any(value is one for one in own)}
        return (_new_module, (original,), state, *reduced[3:])

    namespace: dict[str, Any] = {
        # Registries are keyed by str(class) (transformers' output capturing), and messages should name the user's class.
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_apply": _apply,
        "__reduce_ex__": __reduce_ex__,
        "_megatrain_original_class": original,
    }
    if can_checkpoint:
        namespace[_CHECKPOINTING] = _NoCheckpointing()
    return type(original.__name__, (original,), namespace)


def install_proxy(layer: nn.Module, runner: Callable[..., Any], before_copy: Callable[[], None]) -> Callable[..., Any]:
    """Turns ``layer`` into a proxy whose forward is ``runner(layer, *args, **kwargs)``; returns its own, bound, as it was.

    ``before_copy`` is called before it is copied or pickled.
    """
    original: Any = type(layer)
    # An instance's own forward was patched in by somebody before us.
    forward = layer.__dict__.pop("forward", None) or original.forward.__get__(layer, original)
    if layer.__dict__.get(_CHECKPOINTING, False):
        _note_checkpointing_ignored()
    # The proxy's descriptor hides an instance's own value; where the class has none, that must be there again afterwards.
    can_checkpoint = hasattr(layer, _CHECKPOINTING)
    if hasattr(original, _CHECKPOINTING):
        layer.__dict__.pop(_CHECKPOINTING, None)
    layer.__class__ = _proxy_class(original, can_checkpoint)
    # Not only where a compiler traces this: a frame that it has given up on runs as it is, and what it calls is compiled.
    run: Any = torch.compiler.disable(runner)
    # The Trainer asks a model what it takes and drops the other columns; the model itself may be the layer.
    run.__signature__ = inspect.signature(original.forward)
    # A method as any forward is, since Accelerate takes a model's apart and binds it anew.
    layer.__dict__["forward"] = layer.__dict__[_RUNNER] = types.MethodType(run, layer)
    layer.__dict__[_BEFORE_COPY] = before_copy
    return forward


def remove_proxy(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives a layer that is a proxy its own class and forward back."""
    if not is_proxy(layer):
        return
    original: Any = layer._megatrain_original_class
    layer.__class__ = original
    runner = layer.__dict__.pop(_RUNNER)
    layer.__dict__.pop(_BEFORE_COPY)
    if getattr(forward, "__func__", None) is not original.forward:
        layer.forward = forward
    elif layer.__dict__.get("forward") is runner:  # else somebody has put another one there since
        del layer.__dict__["forward"]


def is_proxy(module: nn.Module) -> bool:
    return _RUNNER in module.__dict__

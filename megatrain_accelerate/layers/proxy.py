"""Proxies: layers of the user's model that keep class, names, attributes and children, but hold no weights. Each has
attributes of its own in the place of its class's: a ``forward``, the streaming runtime's, and those by which modules are cast,
moved, copied and pickled. Copies and pickles are plain modules."""

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

_OWN = "_megatrain_own"
"""The attribute of a proxy with those that it was given, by name, and with what it had in their places."""
_CHECKPOINTING = "gradient_checkpointing"
"""The flag of modules has this name in all releases of transformers, whatever the training arguments are called."""

warn_once = functools.cache(functools.partial(logger.warning, "megatrain: %s"))
"""Warns of a message once a process."""


def modules_that_checkpoint(model: nn.Module) -> weakref.WeakSet[nn.Module]:
    """Modules that have a flag for activation checkpointing: layers, what is around them, and what is inside."""
    return weakref.WeakSet(module for module in model.modules() if hasattr(module, _CHECKPOINTING))


def leave_checkpointing_off(modules: Iterable[nn.Module]) -> None:
    """Switches the flag of the modules off, and says so once where it was on: the engine recomputes already."""
    for module in modules:
        if module.__dict__.get(_CHECKPOINTING):
            module.__dict__[_CHECKPOINTING] = False
            warn_once(
                "layers are recomputed by the streaming engine; activation_checkpointing (gradient_checkpointing) is left off "
                "in them"
            )


def _apply(layer: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Does nothing, and says so once if ``to(dtype)`` or the like was asked for. ``cuda()`` and the like would bring the whole
    model to the GPU, and put rounded weights in the masters' place."""
    first = next(layer.parameters(), None)
    # fn is any of to(), half(), cuda(), ...: what it does to an empty tensor tells.
    if first is not None and fn(first.new_empty(0)).dtype != first.dtype:
        warn_once(
            "the dtype of a prepared model's layers isn't changed by to(), half() and the like; "
            "cast the model before accelerator.prepare()"
        )
    return layer


def _reduced(layer: nn.Module, before_copy: Callable[[], None], protocol: Any) -> Any:
    before_copy()
    reduced: Any = object.__reduce_ex__(layer, protocol)
    own, before = layer.__dict__[_OWN]
    given = {_OWN, *(name for name, value in own.items() if layer.__dict__.get(name) is value)}
    state = {key: value for key, value in reduced[2].items() if key not in given}
    return (*reduced[:2], state | before, *reduced[3:])


def install_proxy(layer: nn.Module, runner: Callable[..., Any], before_copy: Callable[[], None]) -> Callable[..., Any]:
    """Turns ``layer`` into a proxy whose forward is ``runner(layer, *args, **kwargs)``; returns its own, bound, as it was.
    ``before_copy`` is called before it is copied or pickled."""
    original: Any = type(layer)
    # An instance's own forward was patched in by somebody before us.
    forward = layer.__dict__.pop("forward", None) or original.forward.__get__(layer, original)
    # Not only where a compiler traces this: a frame that it has given up on runs as it is, and what it calls is compiled.
    run: Any = torch.compiler.disable(runner)
    # The Trainer asks a model what it takes and drops the other columns; the model itself may be the layer.
    run.__signature__ = inspect.signature(original.forward)
    own: dict[str, Any] = {
        # A method as any forward is, since Accelerate takes a model's apart and binds it anew.
        "forward": types.MethodType(run, layer),
        "_apply": types.MethodType(_apply, layer),
        "__reduce_ex__": functools.partial(_reduced, layer, before_copy),
    }
    if not hasattr(original, _CHECKPOINTING) and _CHECKPOINTING in layer.__dict__:
        own[_CHECKPOINTING] = False  # what the layer set for itself counts again afterwards, and in copies
    before = {name: layer.__dict__[name] for name in own.keys() & layer.__dict__.keys()}
    leave_checkpointing_off([layer])
    layer.__dict__.update(own)
    layer.__dict__[_OWN] = own, before
    return forward


def remove_proxy(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives a layer that is a proxy its own forward back, and what else it had."""
    if is_proxy(layer):
        own, before = layer.__dict__.pop(_OWN)
        for name, value in own.items():
            if layer.__dict__.get(name) is value:  # else somebody has put another one there since
                del layer.__dict__[name]
                layer.__dict__.update({name: before[name]} if name in before else {})
        if getattr(forward, "__func__", None) is not type(layer).forward:
            layer.forward = forward


def is_proxy(module: nn.Module) -> bool:
    return _OWN in module.__dict__

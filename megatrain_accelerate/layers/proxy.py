"""Proxies: layers of the user's model that keep class, names, attributes and children, but hold no weights. A proxy has
instance attributes that override those of its class: a ``forward``, which is the streaming runtime's, and those by which
modules are cast, moved, copied and pickled. Copies and pickles are plain modules."""

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
"""The attribute of a proxy that holds the attributes which it was given, by name, and those that they replaced."""
_CHECKPOINTING = "gradient_checkpointing"
"""The name of modules' flag in all releases of transformers, whatever the training arguments are called."""

warn_once = functools.cache(functools.partial(logger.warning, "megatrain: %s"))
"""Logs a warning, each text once a process."""


def modules_that_checkpoint(model: nn.Module) -> weakref.WeakSet[nn.Module]:
    """Returns the modules with a flag for activation checkpointing: layers, what is around them, and what is inside."""
    return weakref.WeakSet(module for module in model.modules() if hasattr(module, _CHECKPOINTING))


def leave_checkpointing_off(modules: Iterable[nn.Module]) -> None:
    """Switches the modules' flags off, since the engine recomputes already. Says so once if one was on."""
    for module in modules:
        if module.__dict__.get(_CHECKPOINTING):
            module.__dict__[_CHECKPOINTING] = False
            warn_once(
                "layers are recomputed by the streaming engine; activation_checkpointing (gradient_checkpointing) is switched "
                "off in them"
            )


def _apply(layer: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Leaves the layer as it is, and says so once if its dtype was to change (``to(dtype)`` and the like). ``cuda()`` and the
    like would bring the whole model to the GPU, and replace masters by rounded weights."""
    first = next(layer.parameters(), None)
    # fn is any of to(), half(), cuda(), ...: its effect on an empty tensor tells.
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
    """Turns ``layer`` into a proxy whose forward is ``runner(layer, *args, **kwargs)``. Returns its own forward, bound.
    ``before_copy`` is called before the layer is copied or pickled."""
    original: Any = type(layer)
    # An instance's own forward was patched in by somebody before us.
    forward = layer.__dict__.pop("forward", None) or original.forward.__get__(layer, original)
    # Disabled even where no compiler traces this: what a frame calls is compiled even if the frame itself was given up on.
    run: Any = torch.compiler.disable(runner)
    # The Trainer drops columns that a model's forward doesn't take, and the model itself may be the layer.
    run.__signature__ = inspect.signature(original.forward)
    own: dict[str, Any] = {
        # A bound method, like any forward, since Accelerate unbinds a model's and binds it anew.
        "forward": types.MethodType(run, layer),
        "_apply": types.MethodType(_apply, layer),
        "__reduce_ex__": functools.partial(_reduced, layer, before_copy),
    }
    if not hasattr(original, _CHECKPOINTING) and _CHECKPOINTING in layer.__dict__:
        own[_CHECKPOINTING] = False  # the layer's own value counts again afterwards, and in copies
    before = {name: layer.__dict__[name] for name in own.keys() & layer.__dict__.keys()}
    leave_checkpointing_off([layer])
    layer.__dict__.update(own)
    layer.__dict__[_OWN] = own, before
    return forward


def remove_proxy(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives a proxy back the forward that the layer had, and its other attributes. Does nothing to other modules."""
    if is_proxy(layer):
        own, before = layer.__dict__.pop(_OWN)
        for name, value in own.items():
            if layer.__dict__.get(name) is value:  # else somebody has replaced it since
                del layer.__dict__[name]
                layer.__dict__.update({name: before[name]} if name in before else {})
        if getattr(forward, "__func__", None) is not type(layer).forward:
            layer.forward = forward


def is_proxy(module: nn.Module) -> bool:
    return _OWN in module.__dict__

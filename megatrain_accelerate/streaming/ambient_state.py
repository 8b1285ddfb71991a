"""Saves what a layer's forward depends on besides its inputs, and restores it when a part of the forward is recomputed.

That is: the state of the random generators, autocast, and the modes and forward hooks of the layer's modules.
"""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


Again = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context manager that restores saved state for its block."""


def autocast_again(device_type: str) -> Again:
    """Saves the current autocast settings of one device type and of the CPU."""
    settings = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {device_type, "cpu"}]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in settings:
                # Without autocast's cache: it would hold a weight's cast copy when another layer's weights lie in the slot.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    return entered


class RandomState:
    """A snapshot of the global random generators: torch's for the CPU and for one CUDA device, Python's and NumPy's.

    Args:
        device: the device; if it is a GPU, its generator is saved as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # legacy=False works for every bit generator of NumPy

    def put_back(self) -> None:
        """Restores the generators: the next random numbers are those that were drawn after the snapshot."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@contextlib.contextmanager
def random_numbers_put_back(device: torch.device) -> Iterator[None]:
    """Restores the generators after the block, as ``torch.random.fork_rng()`` does, but Python's and NumPy's as well.

    Args:
        device: see :class:`RandomState`.
    """
    before = RandomState(device)
    try:
        yield
    finally:
        before.put_back()


def modules_again(module: nn.Module) -> Again:
    """Saves the modes (``train()``, ``eval()``) and forward hooks of a layer's modules.

    The context manager sets them for its block and puts back afterwards what it found. Both may have changed since: a script
    may evaluate the model between a forward and its backward, and PEFT registers hooks for one forward only. Hooks on the
    layer itself are ignored, since they run outside what is recomputed.
    """
    found = [(part, part.training, _hooks(part) if part is not module else None) for part in module.modules()]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        before: list[tuple[nn.Module, dict[str, Any]]] = []
        for part, training, hooks in found:
            own = part.__dict__
            if own["training"] != training or (hooks is not None and hooks != _hooks(part)):
                before.append((part, {name: own[name] for name in ("training", *_HOOKS)}))
                own["training"] = training
                if hooks is not None:
                    own.update((name, OrderedDict(hooks.get(name, {}))) for name in _HOOKS)
        try:
            yield
        finally:
            for part, state in before:
                part.__dict__.update(state)

    return entered


def _hooks(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """Returns copies of the module's hook dicts that aren't empty, by attribute name."""
    own = module.__dict__
    return {name: dict(own[name]) for name in _HOOKS if own[name]}


def surroundings_again(device: torch.device, module: nn.Module) -> Again:
    """Saves random state, autocast, modes and hooks, to restore them when a layer's forward is recomputed.

    After the block the caller's are as they were before it.

    Args:
        device: on which the layer runs.
        module: the layer's.
    """
    random_numbers, autocast, modules = RandomState(device), autocast_again(device.type), modules_again(module)

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with random_numbers_put_back(device), autocast(), modules():
            random_numbers.put_back()
            yield

    return entered

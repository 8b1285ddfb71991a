"""Random numbers, autocast and modes of modules of a forward, to be entered again where something of it is computed anew."""

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
"""Makes a context manager in which something is as it was."""


def autocast_again(device_type: str) -> Again:
    """Autocast as it is now, for kernels of one device and of the CPU."""
    settings = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {device_type, "cpu"}]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in settings:
                # No cache: a cast weight must not outlive its slot.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    return entered


class RandomState:
    """The global generators as they are when this is made: torch's for the CPU and one device, Python's and NumPy's.

    Args:
        device: the device; on the CPU there is no other generator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # whichever generator it is

    def put_back(self) -> None:
        """The next numbers are those that came when this was made."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@contextlib.contextmanager
def random_numbers_put_back(device: torch.device) -> Iterator[None]:
    """Runs the body, whose random numbers nobody sees who draws later.

    Args:
        device: see :class:`RandomState`.
    """
    before = RandomState(device)
    try:
        yield
    finally:
        before.put_back()


def modules_again(module: nn.Module) -> Again:
    """Modes (``train()``, ``eval()``) and forward hooks of a layer's modules as they are now; then they are put back.

    A script may evaluate the model between a forward and its backward, and PEFT registers hooks for one forward only. The
    layer's own hooks aren't looked at, since they run outside what is computed anew.
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
    """Copies of those of its registries of hooks that aren't empty."""
    own = module.__dict__
    return {name: dict(own[name]) for name in _HOOKS if own[name]}


def surroundings_again(device: torch.device, module: nn.Module) -> Again:
    """Random numbers, autocast and modes of modules as they are now, for what a layer's forward computes to be computed anew;
    the caller's go on as they were.

    Args:
        device: where it runs.
        module: the layer's.
    """
    random_numbers, autocast, modules = RandomState(device), autocast_again(device.type), modules_again(module)

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with random_numbers_put_back(device), autocast(), modules():
            random_numbers.put_back()
            yield

    return entered

"""Saves what a layer's forward depends on besides its inputs, and restores it for a recompute: RNG state, autocast, the modes
and forward hooks of the layer's modules, and the buffers that it writes."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from megatrain_accelerate.units import MIB

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)

Restored = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context manager that restores saved state for its block."""

_COPIED_UNSEEN_BYTES = 16 * MIB
"""A layer's first forward copies buffers up to this size, since it isn't known yet which it writes. Larger ones are masks."""

BufferValues = list[tuple[nn.Module, str, torch.Tensor]]
"""(module, name, copy) of buffers before a run."""


def autocast_restored(device_type: str) -> Restored:
    """Saves the current autocast settings of one device type and of the CPU."""
    settings = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {device_type, "cpu"}]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in settings:
                # Without autocast's cache, which would hold a weight's cast copy when the slot holds another layer's weights.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    return entered


@contextlib.contextmanager
def put_in(entries: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Sets each (dict, key, value) while the body runs, in modules' dicts of parameters, buffers or attributes."""
    before = [(table, name, table[name]) for table, name, _ in entries]
    try:
        for table, name, value in entries:
            table[name] = value
        yield
    finally:
        for table, name, value in before:
            table[name] = value


class RngState:
    """A snapshot of the RNG state of torch (CPU and ``device``), Python and NumPy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # legacy=False works for every bit generator of NumPy

    def restore(self) -> None:
        """Restores the RNG state, so that the next random numbers are those drawn after the snapshot."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def has_advanced(self) -> bool:
        """Whether torch or Python has drawn a random number since. NumPy isn't looked at."""
        now = RngState(self._device)
        pairs = ((now._cpu, self._cpu), (now._cuda, self._cuda))
        return now._python != self._python or any(a is not None and b is not None and not a.equal(b) for a, b in pairs)


@contextlib.contextmanager
def rng_state_restored(device: torch.device) -> Iterator[None]:
    """Restores the RNG state after the block, like ``torch.random.fork_rng()`` but also that of Python and NumPy."""
    before = RngState(device)
    try:
        yield
    finally:
        before.restore()


def _hooks(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """Copies of the module's hook dicts that aren't empty, by attribute name."""
    own = module.__dict__
    return {name: dict(own[name]) for name in _HOOKS if own[name]}


def forward_state_restored(device: torch.device, module: nn.Module) -> Restored:
    """Saves RNG state, autocast, modes and hooks. All may have changed when the layer is recomputed, by an evaluation between
    forward and backward or by hooks that PEFT sets for one forward. Hooks on the layer itself aren't part of a recompute."""
    rng_state, autocast = RngState(device), autocast_restored(device.type)
    modules = [(part, part.training, _hooks(part) if part is not module else None) for part in module.modules()]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        entries: list[tuple[dict[str, Any], str, Any]] = []
        for part, training, hooks in modules:
            if part.training != training:
                entries.append((part.__dict__, "training", training))
            if hooks is not None and hooks != _hooks(part):
                entries += [(part.__dict__, name, OrderedDict(hooks.get(name, {}))) for name in _HOOKS]
        with rng_state_restored(device), autocast(), put_in(entries):
            rng_state.restore()
            yield

    return entered


class WrittenBuffers:
    """Finds the buffers that a layer writes in its forwards (running statistics, counters). A recompute starts from copies of
    their values before its forward, and leaves no trace in them. With torch/utils/checkpoint.py BatchNorm counts twice."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [owner for owner in module.modules() if owner._buffers]
        self._written: set[tuple[nn.Module, str]] | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[BufferValues]:
        """Yields copies of the buffers that the forward in the body may write. Afterwards the list has only those it wrote."""
        known, buffers = self._written, [(owner, *item) for owner in self._owners for item in owner._buffers.items()]
        present = [(owner, name, buffer, buffer._version) for owner, name, buffer in buffers if buffer is not None]
        kept: BufferValues = [
            (owner, name, buffer.detach().clone())
            for owner, name, buffer, _ in present
            if (buffer.nbytes <= _COPIED_UNSEEN_BYTES if known is None else (owner, name) in known)
        ]
        yield kept
        # Kernels of norms write running statistics without raising the buffer's version.
        written = {
            (owner, name)
            for owner, name, buffer, version in present
            if (isinstance(owner, _NormBase) and owner.training)
            or owner._buffers.get(name) is not buffer
            or buffer._version != version
        }
        self._written = written | (self._written or set())
        kept[:] = [value for value in kept if value[:2] in written]

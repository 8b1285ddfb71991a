"""Buffers that a layer writes while it runs (running statistics, counters): a recompute begins with those that its forward
began with, and leaves no trace in them.

Plain activation checkpointing does neither (torch/utils/checkpoint.py): there a recomputed BatchNorm counts each batch twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from megatrain_accelerate.units import MIB

_COPIED_UNSEEN_BYTES = 16 * MIB
"""In a first forward, when nobody knows yet what it writes: larger ones are masks."""

BufferValues: TypeAlias = list[tuple[nn.Module, str, torch.Tensor]]
"""(module, name, copy) of buffers as they were before a run."""


class WrittenBuffers:
    """One layer's. Which of its buffers it writes is seen in its first forward, and noted where others are written later.

    Args:
        module: the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [owner for owner in module.modules() if owner._buffers]
        self._written: set[tuple[nn.Module, str]] | None = None

    def watched(self, before: list[BufferValues]) -> contextlib.AbstractContextManager[None]:
        """For a forward: what it writes is appended to ``before``, as it was."""
        if self._owners:
            return self._watch(before)
        before.append([])
        return contextlib.nullcontext()

    def _may_write(self, owner: nn.Module, name: str, buffer: torch.Tensor) -> bool:
        return buffer.nbytes <= _COPIED_UNSEEN_BYTES if self._written is None else (owner, name) in self._written

    @contextlib.contextmanager
    def _watch(self, before: list[BufferValues]) -> Iterator[None]:
        present = [
            (owner, name, buffer, buffer._version, buffer.detach().clone() if self._may_write(owner, name, buffer) else None)
            for owner in self._owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        yield
        if self._written is None:
            self._written = set()
        before.append([])
        for owner, name, buffer, version, value in present:
            # Kernels of norms write running statistics without counting it as a write.
            is_statistic = isinstance(owner, _NormBase) and owner.training
            if is_statistic or owner._buffers.get(name) is not buffer or buffer._version != version:
                self._written.add((owner, name))
                if value is not None:
                    before[-1].append((owner, name, value))


@contextlib.contextmanager
def buffers_as_before(values: BufferValues) -> Iterator[None]:
    """For a recompute: it works on copies of what its forward began with."""
    now = [(owner, name, owner._buffers[name]) for owner, name, _ in values]
    for owner, name, value in values:
        owner._buffers[name] = value.clone()
    try:
        yield
    finally:
        for owner, name, buffer in now:
            owner._buffers[name] = buffer

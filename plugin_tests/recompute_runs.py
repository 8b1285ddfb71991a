"""Recomputes of compiled layers whose memory is full of NaN: what isn't computed shows where it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.streaming.generated_code import ShortCode


def poison_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a recompute allocates is NaN, or one where there is none, until it is written to."""
    function = ShortCode.function

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def full(*arguments: Any) -> torch.Tensor:
            made = allocate(*arguments)
            return made.fill_(float("nan") if made.is_floating_point() else 1)

        return full

    def with_poison(self: ShortCode, module: dict[str, Any]) -> Any:
        names = ("empty_strided_cpu", "empty_strided_cuda")
        return function(self, {**module, **{name: poisoned(module[name]) for name in names}})

    monkeypatch.setattr(ShortCode, "function", with_poison)


def run_layer(
    engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], is_recompute: bool, index: int = 0
) -> tuple[Any, list[torch.Tensor]]:
    """One compiled run of a layer between steps: its output, and what it saves for backward, in order."""
    layer, runtime = engine.runtime.layers[index], engine.runtime
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach().clone())
        return tensor

    slot = runtime.prefetcher.acquire(layer, ())
    try:
        weights = [view.data.requires_grad_() for view in slot.views(layer.unit.layout)]
        with layer.bound(weights), torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            output = runtime.compiled.run(layer, args, kwargs, is_recompute)
    finally:
        runtime.prefetcher.release(slot)
    return output, saved

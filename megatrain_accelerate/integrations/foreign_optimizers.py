"""Optimizers that step a streamed model's weights without ``accelerator.prepare()`` having seen them.

Their writes are found by the weights' versions, but for those of torch's fused kernels, which count none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatrain_accelerate.engine import all_engines
from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.memory.parameter_state import ParameterState

_handles: list[Any] = []


def watch() -> None:
    """Looks at the steps of all optimizers from the first call on."""
    if not _handles:
        _handles.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))


def _stepped(optimizer: Optimizer) -> Iterator[ParameterState]:
    """The places of the parameters that an optimizer steps by itself: neither an adopted one, nor one that it calls."""
    if hasattr(type(optimizer), "_megatrain_original_class"):
        return
    for engine in all_engines():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = engine.runtime.state_of(parameter)
                # An adopted optimizer that isn't fused shows fp32 masters, to those that it calls too.
                if state is not None and not engine.is_closed and parameter.dtype == state.weight.dtype:
                    yield state


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises where weights would be stepped that are only the upper halves of their masters.

    Raises:
        UnsupportedError: such are among the optimizer's.
    """
    halves = sum(state.residual is not None for state in _stepped(optimizer))
    if halves:
        raise UnsupportedError(
            f"this {type(optimizer).__name__} wasn't given to accelerator.prepare() and holds {halves} parameters of a "
            "prepared model, whose weights are bf16 while their fp32 masters lie elsewhere: it would round its updates away. "
            "Prepare it with the model"
        )


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for state in _stepped(optimizer):
        state.handle.mark_written()

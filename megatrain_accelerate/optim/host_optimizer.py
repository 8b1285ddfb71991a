"""The optimizer that the Trainer sees: the user's own object, whose ``step()`` works on the host store.

The object stays the same, since schedulers hold it; only its class is swapped for a subclass made here. Adam and AdamW
run the fused kernel, deferred; any other torch optimizer runs its own ``step()`` on fp32 masters.
"""

from __future__ import annotations

import copyreg
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.optim.fused_step import UNFUSED_OPTIONS, FusedStep, refuse_unfused
from megatrain_accelerate.optim.host_step import HostStep
from megatrain_accelerate.optim.master_step import MasterStep
from megatrain_accelerate.optim.moment_states import shown_in_fp32, without_residual
from megatrain_accelerate.streaming.runtime import StreamingRuntime
from megatrain_accelerate.streaming.watched_parameters import unwatched


def adopt_optimizer(optimizer: Optimizer, runtime: StreamingRuntime, schedule: str) -> HostStep:
    """Makes ``optimizer`` step on the host store of ``runtime``. Its identity, groups and defaults stay.

    Args:
        optimizer: any ``torch.optim.Optimizer`` over trained parameters of the model, and others that don't stream.
        runtime: the model's engine.
        schedule: ``deferred``, ``backward`` or ``serial``; other optimizers than Adam and AdamW are always serial.

    Raises:
        UnsupportedError: it holds trained parameters of another streamed model, or can't work with the settings.
    """
    runtime.drain()  # steps of an optimizer before this one still write the moments
    optimizer.__class__ = getattr(type(optimizer), "_megatrain_original_class", type(optimizer))
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS runs the model several times within one step(), which can't stream; use AdamW or another first-order one"
        )
    # What the fused kernel does is what the optimizer's own step would do.
    is_fusable = type(optimizer) in (Adam, AdamW) and not any(
        group.get(option) for group in optimizer.param_groups for option in UNFUSED_OPTIONS
    )
    driver = FusedStep(optimizer, runtime, schedule) if is_fusable else MasterStep(optimizer, runtime)
    optimizer.__class__ = _swapped_class(type(optimizer), driver)
    _drop_bound_step(optimizer)
    return driver


def _swapped_class(original: type[Optimizer], driver: FusedStep | MasterStep) -> type[Optimizer]:
    runtime, row = driver.runtime, driver.runtime.norms.row
    # Without the hooks that users and torch's profiler have on it.
    own_step: Callable[[Optimizer], Any] = getattr(original.step, "__wrapped__", original.step)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        driver.step(self, lambda: own_step(self))
        return loss

    def state_dict(self: Optimizer) -> dict[str, Any]:
        runtime.drain()
        # Of weights that somebody wrote to, the residuals count no more.
        runtime.refresh_if_written()
        return driver.saved(self, original.state_dict(self))

    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        runtime.drain()
        # Weights that were loaded before are taken over now: seen later, they would reset the residuals loaded here.
        runtime.refresh_if_written()
        driver.load(self, state_dict, lambda saved: original.load_state_dict(self, saved))

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        original.add_param_group(self, param_group)  # brings what it is given into one form
        try:
            if isinstance(driver, FusedStep):
                refuse_unfused(self.param_groups[-1:])
            if not driver.is_retired:
                # One of the model's that was frozen when it was prepared may wait for that to be done anew.
                driver.hold([p for p in self.param_groups[-1]["params"] if row(p) is not None or runtime.state_of(p) is None])
        except BaseException:
            del self.param_groups[-1]
            raise

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none:
            # Gradients on their way would come to lie over the zeros, and a deferred step may still read them.
            runtime.watch.settle()
        with unwatched():
            original.zero_grad(self, set_to_none or runtime.config.passes_gradients)

    def __reduce_ex__(self: Optimizer, protocol: Any) -> Any:
        """Copies and pickles are plain optimizers of the original class: they hold copies of the parameters."""
        runtime.drain()
        runtime.refresh_if_written()
        kept = self.__getstate__()
        # As torch's own would hold it: without residuals, and moments in fp32.
        shown = shown_in_fp32(kept["state"], runtime.config.host_memory_gib)
        states = defaultdict(dict, {key: without_residual(entry) for key, entry in shown.items()})
        # torch's own class by a function of Python's own: a pickle must load where this package isn't.
        made = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        return *made, {**kept, "state": states}

    hooked_step = Optimizer.profile_hook_step(step)  # step hooks of users fire as for any optimizer
    hooked_step.hooked = True  # type: ignore[attr-defined]
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_megatrain_original_class": original,
        "step": hooked_step,
    }
    methods = (state_dict, load_state_dict, add_param_group, zero_grad, __reduce_ex__)
    return type(original.__name__, (original,), {**members, **{method.__name__: method for method in methods}})


def _drop_bound_step(optimizer: Optimizer) -> None:
    """Removes the bound ``step`` of the old class that a scheduler leaves on the instance, and keeps its bookkeeping."""
    bound = optimizer.__dict__.pop("step", None)
    if bound is None or not getattr(bound, "_wrapped_by_lr_sched", False):
        return

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]

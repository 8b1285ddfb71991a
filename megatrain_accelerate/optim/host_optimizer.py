"""The optimizer that the Trainer sees: the user's own object, whose ``step()`` works on the host store.

The object stays the same, since schedulers hold it; only its class is swapped for a subclass made here. Adam and AdamW
run the fused kernel, deferred; any other torch optimizer runs its own ``step()`` on fp32 masters.
"""

from __future__ import annotations

import copyreg
import logging
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

logger = logging.getLogger(__name__)


def is_fusable(optimizer: Optimizer) -> bool:
    """Whether the fused kernel does what this optimizer's own step would do."""
    if type(optimizer) not in (Adam, AdamW):
        return False
    return not any(group.get(option) for group in optimizer.param_groups for option in UNFUSED_OPTIONS)


def _swapped_class(optimizer: Optimizer, namespace: dict[str, Any]) -> type[Optimizer]:
    original = type(optimizer)
    step = Optimizer.profile_hook_step(namespace["step"])  # step hooks of users fire as for any optimizer
    step.hooked = True  # type: ignore[attr-defined]
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        **namespace,
        "step": step,
    }
    return type(original.__name__, (original,), members)


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


def _run_closure(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _own_step(original: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The step of an optimizer's class without the hooks that users and torch's profiler have on it."""
    step: Callable[[Optimizer], Any] = getattr(original.step, "__wrapped__", original.step)
    return step


def _shared_members(original: type[Optimizer], driver: HostStep) -> dict[str, Any]:
    """Methods that both kinds of host optimizer have."""
    runtime, row = driver.runtime, driver.runtime.norms.row

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
        # torch's own class by a function of Python's own: a pickle must load where this package isn't.
        made = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        return *made, {**kept, "state": _plain_states(kept["state"], runtime)}

    return {
        "add_param_group": add_param_group,
        "zero_grad": zero_grad,
        "__reduce_ex__": __reduce_ex__,
        "_megatrain_original_class": original,
    }


def _plain_states(states: dict[Any, Any], runtime: StreamingRuntime) -> defaultdict[Any, Any]:
    """An optimizer's state as torch's own would hold it: without residuals, and moments in fp32."""
    shown = shown_in_fp32(states, runtime.config.host_memory_gib)
    return defaultdict(dict, {key: without_residual(entry) for key, entry in shown.items()})


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
    original = getattr(type(optimizer), "_megatrain_original_class", type(optimizer))
    optimizer.__class__ = original
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS runs the model several times within one step(), which can't stream; use AdamW or another first-order one"
        )
    if is_fusable(optimizer):
        driver: HostStep = _adopt_fused(optimizer, runtime, schedule)
    else:
        driver = _adopt_other(optimizer, runtime)
    _drop_bound_step(optimizer)
    return driver


def _adopt_fused(optimizer: Optimizer, runtime: StreamingRuntime, schedule: str) -> FusedStep:
    driver = FusedStep(optimizer, runtime, schedule)
    original = type(optimizer)
    own_step = _own_step(original)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = _run_closure(closure)
        with torch.no_grad():
            driver.step(self, lambda: own_step(self))
        return loss

    def state_dict(self: Optimizer) -> dict[str, Any]:
        runtime.drain()
        # Of weights that somebody wrote to, the residuals count no more.
        runtime.refresh_if_written()
        found = original.state_dict(self)
        return {**found, "state": shown_in_fp32(found["state"], runtime.config.host_memory_gib)}

    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        refuse_unfused(state_dict["param_groups"])
        runtime.drain()
        driver.forget_backward()
        # Weights that were loaded before are taken over now: seen later, they would reset the residuals loaded here.
        runtime.refresh_if_written()
        # torch's own way would cast the moments to the weights' dtype and device, and hold a second copy.
        entries = {key: state_dict["state"].get(key) or {} for key, _ in driver.by_key(self, state_dict)}
        outside = {key: without_residual(entries[key]) for key, p in driver.by_key(self, state_dict) if driver.is_outside(p)}
        outside = {} if driver.is_retired else outside
        original.load_state_dict(self, {"state": outside, "param_groups": state_dict["param_groups"]})
        for key, parameter in driver.by_key(self, state_dict):
            state, entry = runtime.state_of(parameter), entries[key]
            if driver.is_retired:
                self.state[parameter] = dict(entry)
            elif state is not None and state.entry.spec.trainable:
                driver.import_state(state, entry)
            elif state is not None and entry:  # frozen now: it waits for the parameter to be trained again
                self.state[parameter] = dict(entry)

    members = {"step": step, "state_dict": state_dict, "load_state_dict": load_state_dict}
    optimizer.__class__ = _swapped_class(optimizer, {**members, **_shared_members(original, driver)})
    return driver


def _adopt_other(optimizer: Optimizer, runtime: StreamingRuntime) -> MasterStep:
    if runtime.config.passes_gradients:
        raise UnsupportedError(
            f"{type(optimizer).__name__} has no fused host kernel, so that it can't consume gradients in backward; set "
            "megatrain_config.host_gradients to 'kept' (2 bytes a parameter more), or use AdamW"
        )
    if runtime.config.moments_dtype != "fp32":
        raise UnsupportedError(
            f"{type(optimizer).__name__} has no fused host kernel and keeps its own states; leave out "
            "megatrain_config.moments_dtype, which is for AdamW and Adam"
        )
    driver = MasterStep(optimizer, runtime)
    runtime.keep_states_on_host()
    original = type(optimizer)
    own_step = _own_step(original)
    logger.warning(
        "megatrain: %s has no fused host kernel; its own step() runs on fp32 masters on the host (slower, 8 bytes a "
        "parameter more while it runs). AdamW and Adam are fused",
        original.__name__,
    )

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = _run_closure(closure)
        driver.step(self, lambda: own_step(self))
        return loss

    def state_dict(self: Optimizer) -> dict[str, Any]:
        runtime.drain()
        runtime.refresh_if_written()
        return driver.with_residuals(self, original.state_dict(self))

    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        runtime.drain()
        runtime.refresh_if_written()
        driver.load(self, state_dict, lambda saved: original.load_state_dict(self, saved))

    members = {"step": step, "state_dict": state_dict, "load_state_dict": load_state_dict}
    optimizer.__class__ = _swapped_class(optimizer, {**members, **_shared_members(original, driver)})
    return driver

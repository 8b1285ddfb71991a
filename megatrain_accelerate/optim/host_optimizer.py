"""The optimizer that the Trainer sees. It is the user's own object, since schedulers hold it. Only its class is swapped, for a
subclass made here whose ``step()`` works on the host store. Adam and AdamW run the fused kernel, after ``step()`` by
default. Any other torch optimizer runs its own ``step()`` on fp32 masters."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.gradients.fp32_sums import joined_sum
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.layers.resident import ResidentGroup
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.layers.watched_parameters import unwatched
from megatrain_accelerate.optim.fused_step import UNFUSED_OPTIONS, FusedStep, refuse_unfused
from megatrain_accelerate.optim.host_step import HostStep, parameters_of
from megatrain_accelerate.optim.moment_states import RESIDUAL_KEY, RESIDUALS_KEY, shown_in_fp32, without_residual
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.transfer.meter import Cause

logger = logging.getLogger(__name__)


def adopt_optimizer(optimizer: Optimizer, runtime: StreamingRuntime, schedule: str) -> HostStep:
    """Makes ``optimizer`` step on the host store of ``runtime``. Its identity, groups and defaults stay. It may also hold
    parameters that don't stream. Raises an UnsupportedError for trained ones of another streamed model, or an optimizer that
    can't work with the settings. ``schedule``: ``deferred``, ``backward`` or ``serial``. All but Adam and AdamW are serial."""
    step = optimizer.__dict__.get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise UnsupportedError(
            "step() of the optimizer was replaced on the object itself (optimizer.step = ...) before it was prepared, or "
            "prepared anew, and what replaced it would step weights without their masters; use "
            "optimizer.register_step_pre_hook() and register_step_post_hook()"
        )
    runtime.bring_states()  # the moments of an earlier optimizer may be on the device
    optimizer.__class__ = getattr(type(optimizer), "_megatrain_original_class", type(optimizer))
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS runs the model several times within step(), which can't stream; use AdamW, for example")
    # Of these classes alone the fused kernel does what the optimizer's own step would do.
    is_fusable = type(optimizer) in (Adam, AdamW) and not any(
        group.get(option) for group in optimizer.param_groups for option in UNFUSED_OPTIONS
    )
    driver = FusedStep(optimizer, runtime, schedule) if is_fusable else MasterStep(optimizer, runtime)
    optimizer.__class__ = _swapped_class(type(optimizer), driver)
    optimizer._patch_step_function()  # step hooks of users fire as for any optimizer
    _drop_bound_step(optimizer)
    return driver


def _swapped_class(original: type[Optimizer], driver: FusedStep | MasterStep) -> type[Optimizer]:
    runtime = driver.runtime
    # Without the wrapper that calls hooks of users and torch's profiler: Swapped.step has one of its own.
    own_step: Callable[[Optimizer], Any] = getattr(original.step, "__wrapped__", original.step)

    class Swapped(original):  # type: ignore[valid-type, misc]
        _megatrain_original_class = original

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with replaced(driver, "is_at_work", True):
                driver.step(self, lambda: own_step(self))
            return loss

        def state_dict(self) -> dict[str, Any]:
            runtime.bring_states()  # the residuals of weights that somebody wrote to no longer count
            return driver.saved(self, original.state_dict(self))

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            # Takes over weights that were loaded before: noticed later, they would reset the residuals loaded here.
            runtime.bring_states()
            # Users' hooks change and see what is loaded, of which torch's own method gets a part.
            pre_hooks, post_hooks = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
            state_dict = state_dict.copy()
            for pre_hook in pre_hooks.values():
                if (changed := pre_hook(self, state_dict)) is not None:
                    state_dict = changed
            with (
                replaced(self, "_optimizer_load_state_dict_pre_hooks", OrderedDict()),
                replaced(self, "_optimizer_load_state_dict_post_hooks", OrderedDict()),
            ):
                driver.load(self, state_dict, lambda saved: original.load_state_dict(self, saved))
            for post_hook in post_hooks.values():
                post_hook(self)

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            original.add_param_group(self, param_group)  # normalises the group
            try:
                if isinstance(driver, FusedStep):
                    refuse_unfused(self.param_groups[-1:])
                if not driver.is_retired:
                    # The model's own that were frozen when it was prepared wait until it is prepared anew.
                    new = self.param_groups[-1]["params"]
                    driver.hold([p for p in new if runtime.trains(p) or runtime.state_of(p) is None])
            except BaseException:
                del self.param_groups[-1]
                raise

        def zero_grad(self, set_to_none: bool = True) -> None:
            if not set_to_none:
                # WAW, WAR: gradients in flight would overwrite the zeros, and a deferred step may still read them.
                runtime.watch.settle()
            with unwatched():
                original.zero_grad(self, set_to_none or runtime.config.passes_gradients)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Makes copies and pickles plain optimizers of the original class, since they hold copies of the parameters."""
            runtime.bring_states()
            kept: Any = self.__getstate__()
            # As torch's own optimizer would hold it: no residuals, and moments in fp32.
            shown = shown_in_fp32(kept["state"], runtime.config.host_memory_gib)
            states = defaultdict(dict, {key: without_residual(entry) for key, entry in shown.items()})
            # Only a class of torch and a function of Python: a pickle must load where this package isn't installed.
            return copyreg._reconstructor, (original, object, None), {**kept, "state": states}  # type: ignore[attr-defined]

    if isinstance(driver, FusedStep):

        def get_state(self: Optimizer) -> Any:
            if not (driver.is_at_work or driver.is_retired):
                runtime.drain()  # RAW, WAW: steps that are under way write to moments
            return self.__dict__["state"]

        Swapped.state = property(get_state, lambda self, state: self.__dict__.update(state=state))
    functools.update_wrapper(Swapped, original, updated=())
    return Swapped


def _drop_bound_step(optimizer: Optimizer) -> None:
    """Replaces the bound ``step`` of the old class that a scheduler left on the instance, and keeps its bookkeeping."""
    if optimizer.__dict__.pop("step", None) is None:
        return

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


class MasterStep(HostStep):
    """Any other torch optimizer: runs its own ``step()`` on fp32 masters on the host, serially. Raises an ``UnsupportedError``
    as :class:`HostStep` does, or for a setting that only the fused kernel supports."""

    def __init__(self, optimizer: Optimizer, runtime: StreamingRuntime) -> None:
        name, config = type(optimizer).__name__, runtime.config
        for is_set, setting in (
            (runtime.ranks is not None, "set num_processes: 1"),
            (config.passes_gradients, "set megatrain_config.host_gradients to 'kept' (2 bytes a parameter more)"),
            (config.moments_dtype != "fp32", f"leave out megatrain_config.moments_dtype, since {name} keeps its own states"),
        ):
            if is_set:
                raise UnsupportedError(f"{name} has no fused host kernel; use AdamW or Adam, or {setting}")
        super().__init__(optimizer, runtime)
        for parameter in parameters_of(optimizer):
            state = runtime.state_of(parameter)
            if state is None and id(parameter) not in self._trained_before:
                continue
            entry = optimizer.state.get(parameter) or {}
            residual = entry.pop(RESIDUAL_KEY, None)
            if state is not None:
                runtime.owner_of(state).unit.write_residual(state, residual)
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step":
                    # As if the states had been made with the masters. Checkpoints are loaded in this dtype, too.
                    entry[key] = value.to("cpu", torch.float32)
        runtime.keep_states_on_host()
        logger.warning(
            "megatrain: %s has no fused host kernel; its own step() runs on fp32 masters on the host (slower, 8 bytes a "
            "parameter more while it runs). AdamW and Adam are fused",
            name,
        )

    def step(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> None:
        """Runs the optimizer's step on fp32 masters and gradients in place of the parameters', and writes the masters back.
        Parameters of other modules are stepped as they are. Takes 8 bytes of host memory a parameter of the model while it
        runs, besides the optimizer's state. Raises what :meth:`begin_step`, :meth:`with_gradients` and :meth:`allows` do."""
        runtime = self.runtime
        self.begin_step()
        found, outside = self.with_gradients(optimizer)
        norm, factors = self.norm_and_factors(optimizer, found, outside)
        if not self.allows(norm):
            runtime.watch.begin()  # another optimizer's step may be under way
            return
        shown: list[tuple[ParameterState, torch.Tensor]] = []
        try:
            with contextlib.ExitStack() as replaced:
                for state, _ in found:
                    assert state.gradient is not None
                    master = runtime.owner_of(state).unit.read_master(state)
                    gradient = state.gradient.float()
                    if state.handle.has_fp32_sum and state.gradient_residual is not None:
                        gradient = joined_sum(state.gradient, state.gradient_residual, runtime.kernels)
                    gradient = gradient * factors.get(id(state.parameter), 1.0)
                    replaced.enter_context(state.handle.replaced(master, gradient))
                    shown.append((state, master))
                parameters = sum(master.numel() for _, master in shown)
                with runtime.meter.blocked_by(Cause.HOST_STEP), runtime.meter.stepping(parameters):
                    own_step()
        finally:
            for state, master in shown:
                runtime.owner_of(state).unit.write_master(state, master)
            for part in {runtime.owner_of(state): None for state, _ in shown}:
                part.unit.version += 1
                runtime.outside.moved(part.unit)  # data of another dtype gave parameters new autograd nodes
                if isinstance(part, ResidentGroup):
                    part.push_weights(part.announce_push())
            runtime.drain()
            runtime.watch.begin()

    def load(self, optimizer: Optimizer, state_dict: dict[str, Any], own_load: Callable[[dict[str, Any]], None]) -> None:
        """Loads the optimizer's states as they were saved, and the masters' residuals. torch casts states to the dtype and
        device of the parameters. Meanwhile these are shown as what the step works on: fp32 on the host."""
        entries = dict(state_dict["state"])
        for key, _ in self.by_key(optimizer, state_dict):
            entries[key] = without_residual(entries.get(key) or {})
            if not entries[key]:
                del entries[key]  # many optimizers make their state only where there is no entry
        with contextlib.ExitStack() as replaced:
            for parameter in parameters_of(optimizer):
                if (state := self.runtime.state_of(parameter)) is not None:
                    likeness = torch.empty((), dtype=torch.float32).expand(parameter.shape)
                    replaced.enter_context(state.handle.replaced(likeness, None))
            own_load({**{key: value for key, value in state_dict.items() if key != RESIDUALS_KEY}, "state": entries})
        for part in self.runtime.unit_owners:
            self.runtime.outside.moved(part.unit)
        self.load_residuals(optimizer, state_dict)

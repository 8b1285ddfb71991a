"""The optimizer that the Trainer sees: the user's own object, whose ``step()`` works on the host store.

The object stays the same, since schedulers hold it; only its class is swapped for a subclass made here. Adam and AdamW
run the fused kernel, deferred; any other torch optimizer runs its own ``step()`` on fp32 masters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from megatrain_accelerate.errors import NonFiniteGradientError, StateError, UnsupportedError
from megatrain_accelerate.memory.host_store import HostUnit, ParameterState
from megatrain_accelerate.optim.fused_step import apply_segments, plan_segments
from megatrain_accelerate.optim.kernel import AdamArguments
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.resident import ResidentGroup
from megatrain_accelerate.streaming.runtime import StreamingRuntime

logger = logging.getLogger(__name__)

RESIDUAL_KEY = "master_residual"
"""Key of the masters' low 16 bits (int16) in the optimizer's state; stock optimizers ignore it."""


def is_fusable(optimizer: Optimizer) -> bool:
    """Whether the fused kernel does what this optimizer's own step would do."""
    if type(optimizer) not in (Adam, AdamW):
        return False
    return not any(group.get("amsgrad") or group.get("differentiable") for group in optimizer.param_groups)


class HostStep:
    """What both kinds of host optimizer share: finding parameters, gradients as a whole, non-finite norms.

    Args:
        optimizer: the user's optimizer.
        runtime: the engine of the model whose parameters it holds.

    Raises:
        UnsupportedError: the optimizer holds parameters that aren't this model's trained ones.
    """

    def __init__(self, optimizer: Optimizer, runtime: StreamingRuntime) -> None:
        self.runtime = runtime
        self._nonfinite_in_a_row = 0
        strangers = sum(
            runtime.norms.row(parameter) is None for group in optimizer.param_groups for parameter in group["params"]
        )
        if strangers:
            raise UnsupportedError(
                f"the optimizer holds {strangers} parameters that the prepared model doesn't train (frozen when it was "
                "prepared, or another module's); give them an optimizer of their own, or unfreeze them before "
                "accelerator.prepare()"
            )

        self.parameter_ids = {id(parameter) for parameter in self.parameters(optimizer)}
        """``id`` of each parameter that the optimizer held when it was adopted."""

    def retire(self) -> None:
        """Another optimizer takes the parameters over: no step is begun from here any more."""

    def parameters(self, optimizer: Optimizer) -> list[torch.nn.Parameter]:
        """All parameters of the optimizer, in group order."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def with_gradients(self, optimizer: Optimizer) -> list[tuple[ParameterState, dict[str, Any]]]:
        """(place, group) of every parameter that has a gradient; brings foreign gradient tensors into the store."""
        found = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.runtime.state_of(parameter)
                if state is None or state.gradient is None:
                    raise UnsupportedError(
                        "a parameter was added to the optimizer after the model was prepared; unfreeze it before "
                        "accelerator.prepare()"
                    )
                is_streamed = parameter.data_ptr() == state.weight.data_ptr()
                if is_streamed and parameter.grad.data_ptr() != state.gradient.data_ptr():
                    self.runtime.drain()  # a step that is still to be applied may read the place
                    state.gradient.copy_(parameter.grad)
                found.append((state, group))
        return found

    def _forget_norms(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters(optimizer):
            self.runtime.norms.forget(parameter)

    def allows(self, norm: float) -> bool:
        """Whether a step with this global norm may be taken; counts and warns where not.

        Raises:
            NonFiniteGradientError: too many steps in a row had a non-finite norm.
        """
        if math.isfinite(norm):
            self._nonfinite_in_a_row = 0
            return True
        self._nonfinite_in_a_row += 1
        self.runtime.meter.counters.skipped_steps += 1
        limit = self.runtime.config.max_nonfinite_steps
        if self._nonfinite_in_a_row >= limit:
            raise NonFiniteGradientError(
                f"the gradient norm was not finite ({norm}) in {self._nonfinite_in_a_row} steps in a row; the weights are "
                "those of the last good step. Lower the learning rate or check the data; "
                "megatrain_config.max_nonfinite_steps sets the limit"
            )
        logger.warning(
            "megatrain: gradient norm is %s, step skipped (%d in a row, %d allowed)",
            norm,
            self._nonfinite_in_a_row,
            limit - 1,
        )
        return False


def _adam_arguments(group: dict[str, Any], step: int, clip_factor: float, decoupled: bool) -> AdamArguments:
    return AdamArguments(
        lr=float(group["lr"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        clip_factor=clip_factor,
        decoupled=decoupled,
        maximize=bool(group["maximize"]),
    )


def _versions(state: ParameterState) -> tuple[int, int]:
    assert state.gradient is not None
    return state.parameter._version, state.gradient._version


def _refuse_written(unit: HostUnit, versions: list[tuple[ParameterState, int, int]]) -> None:
    """A step that is applied later must find what it was taken with.

    Raises:
        StateError: somebody wrote to a weight or gradient in between.
    """
    for state, weight_version, gradient_version in versions:
        now = _versions(state)
        if now != (weight_version, gradient_version):
            what = "weight" if now[0] != weight_version else "gradient"
            raise StateError(
                f"the {what} of {unit.name}.{state.name} was written to after optimizer.step(), before the step was applied; "
                "call megatrain_accelerate.drain() before such writes (optimizer.zero_grad() does it by itself), or set "
                "megatrain_config.step_schedule to 'serial'"
            )


class FusedStep(HostStep):
    """Adam and AdamW by the fused kernel: deferred, serial, or in backward (``config.step_schedule``)."""

    def __init__(self, optimizer: Optimizer, runtime: StreamingRuntime, schedule: str) -> None:
        super().__init__(optimizer, runtime)
        self._decoupled = isinstance(optimizer, AdamW) or any(
            group.get("decoupled_weight_decay") for group in optimizer.param_groups
        )
        self._optimizer_groups = optimizer.param_groups
        self._optimizer_state = optimizer.state
        self._stepped_in_backward: dict[int, AdamArguments] = {}
        self._skipped_in_backward: list[str] = []
        for unit in runtime.units:
            states = [state for state in unit.states if id(state.parameter) in self.parameter_ids]
            if states:
                unit.allocate_moments()
            for state in states:
                self.import_state(state, optimizer.state.pop(state.parameter, None) or {})
        self.set_schedule(schedule)

    def import_state(self, state: ParameterState, values: dict[str, Any]) -> None:
        """Sets a parameter's moments, step and residual from an optimizer's state for it; empty means none yet."""
        if state.exp_avg is None or state.exp_avg_sq is None:
            return
        if not values:
            state.exp_avg.zero_()
            state.exp_avg_sq.zero_()
            return
        for view, key in ((state.exp_avg, "exp_avg"), (state.exp_avg_sq, "exp_avg_sq")):
            if values[key].data_ptr() != view.data_ptr():
                view.copy_(values[key])
        residual = values.get(RESIDUAL_KEY)
        if state.residual is not None and residual is not None and residual.dtype == torch.int16:
            state.residual.copy_(residual)
        entry = self._optimizer_state[state.parameter]
        entry["step"] = torch.tensor(float(values["step"]), dtype=torch.float32)
        self._expose(entry, state)

    def set_schedule(self, schedule: str) -> None:
        """Chooses when the arithmetic runs, from the next backward on: ``deferred``, ``backward`` or ``serial``."""
        self.schedule = schedule
        listeners = self.runtime.offloader.layer_done_listeners
        if schedule == "backward":
            listeners[id(self)] = self._layer_done
        else:
            listeners.pop(id(self), None)

    def retire(self) -> None:
        """See :meth:`HostStep.retire`."""
        self.set_schedule("deferred")

    def bind(self, optimizer: Optimizer) -> None:
        """Follows an optimizer whose state or groups were replaced (``load_state_dict``)."""
        self._optimizer_groups, self._optimizer_state = optimizer.param_groups, optimizer.state

    def _next_step(self, state: ParameterState) -> int:
        """Counts the parameter's step up and returns it; makes its optimizer state at the first."""
        entry = self._optimizer_state[state.parameter]
        if not entry:
            entry["step"] = torch.zeros((), dtype=torch.float32)
            self._expose(entry, state)
        entry["step"] += 1
        return int(entry["step"].item())

    @staticmethod
    def _expose(entry: dict[str, Any], state: ParameterState) -> None:
        """Puts the store's views into an optimizer's state under the names of torch.optim.AdamW."""
        entry["exp_avg"], entry["exp_avg_sq"] = state.exp_avg, state.exp_avg_sq
        if state.residual is not None:
            entry[RESIDUAL_KEY] = state.residual

    def _submit(
        self,
        unit: HostUnit,
        group: ResidentGroup | None,
        steps: list[tuple[ParameterState, AdamArguments]],
        before: Callable[[], bool] | None = None,
    ) -> Any:
        segments = plan_segments(steps)
        runtime = self.runtime
        kernels = runtime.kernels
        issued_event = runtime.streams.event()
        if group is not None:
            issued_event.record(runtime.streams.compute_stream)
            runtime.meter.counters.h2d_bytes += group.device_bytes
        # In backward gradients may still be added up by the worker; step() checks those.
        versions = [] if before is not None else [(state, *_versions(state)) for state, _ in steps]

        def work() -> None:
            if before is not None and not before():
                return
            _refuse_written(unit, versions)
            apply_segments(unit, segments, kernels)
            _refuse_written(unit, versions)
            if group is not None:
                group.push_weights(issued_event)

        # Device copies are stale from now on, whether or not the worker has got to it.
        unit.version += 1
        return self.runtime.worker.submit(f"step ({unit.name})", work)

    def step(self, optimizer: Optimizer) -> None:
        """Fixes the step's settings and gradients, and hands the arithmetic to the worker.

        Raises:
            StepWorkerError: an earlier step failed.
            NonFiniteGradientError: see :meth:`HostStep.allows`.
            StateError: layers were stepped in backward with other settings than those of now.
        """
        runtime = self.runtime
        runtime.worker.raise_if_failed()
        runtime.refresh_if_written()
        runtime.collect_gradients()
        done, self._stepped_in_backward = self._stepped_in_backward, {}
        self._refuse_rewritten(optimizer, done)
        found = self.with_gradients(optimizer)
        norm = float(runtime.total_norm([state.parameter for state, _ in found]))
        factors = runtime.take_clip_factors(self.parameters(optimizer))
        if done:
            self._check_stepped_in_backward(found, factors, done)
            found = [(state, group) for state, group in found if id(state.parameter) not in done]
            skipped, self._skipped_in_backward = self._skipped_in_backward, []
            if skipped:
                norm = math.nan
        allowed = self.allows(norm)
        self._forget_norms(optimizer)
        if not allowed:
            return
        by_parameter = {id(state.parameter): group for state, group in found}
        for unit, gate, resident in runtime.in_forward_order():
            steps = []
            for state in unit.states:
                group = by_parameter.get(id(state.parameter))
                if group is not None:
                    count = self._next_step(state)
                    factor = factors.get(id(state.parameter), 1.0)
                    steps.append((state, _adam_arguments(group, count, factor, self._decoupled)))
            if steps:
                gate.close_until(self._submit(unit, resident, steps))
        if self.schedule == "serial":
            runtime.drain()

    def _refuse_rewritten(self, optimizer: Optimizer, done: dict[int, AdamArguments]) -> None:
        """Gradients that were used in backward must still be what they were."""
        parameters = [parameter for parameter in self.parameters(optimizer) if id(parameter) in done]
        rewritten = sum(not self.runtime.norms.is_current(parameter) for parameter in parameters)
        if rewritten:
            raise StateError(
                f"{rewritten} gradients were changed, replaced or dropped between backward and step() (by a callback, a hook "
                "or clipping in the script), but their layers were stepped in backward already, since max_grad_norm is 0; "
                "set megatrain_config.step_schedule to 'deferred'"
            )

    def _check_stepped_in_backward(
        self,
        found: list[tuple[ParameterState, dict[str, Any]]],
        factors: dict[int, float],
        done: dict[int, AdamArguments],
    ) -> None:
        """Steps taken in backward must be the ones that ``step()`` would have taken."""
        self.runtime.worker.drain()
        for state, group in found:
            used = done.get(id(state.parameter))
            if used is None:
                continue
            factor = factors.get(id(state.parameter), 1.0)
            if used != _adam_arguments(group, used.step, factor, self._decoupled):
                raise StateError(
                    f"layers were stepped in backward with {used}, but at step() gradient clipping (factor {factor}) or the "
                    "optimizer's settings had changed; set megatrain_config.step_schedule to 'deferred'"
                )

    def _layer_done(self, layer: StreamedLayer, wait: Callable[[], None]) -> None:
        """A layer's gradients are on their way to the host: steps it now if this backward is the last before the step."""
        if not self.runtime.may_step_in_backward(layer):
            return
        groups = {id(p): group for group in self._optimizer_groups for p in group["params"]}
        if any(id(state.parameter) in self._stepped_in_backward for state in layer.unit.states):
            raise StateError(
                f"layer {layer.name} was stepped in an earlier backward, and another one came before optimizer.step() (an "
                "accumulation that Accelerate doesn't know of, or a failed backward that was tried again); set "
                "megatrain_config.step_schedule to 'deferred', or use accelerator.accumulate()"
            )
        steps = []
        for state in layer.unit.states:
            if state.parameter.grad is not None and id(state.parameter) in groups:
                group = groups[id(state.parameter)]
                steps.append((state, _adam_arguments(group, self._next_step(state), 1.0, self._decoupled)))
        rows = [self.runtime.norms.row(state.parameter) for state, _ in steps]

        def gradients_are_finite() -> bool:
            wait()
            finite = bool(self.runtime.norms.norms[torch.tensor(rows)].isfinite().all())
            if not finite:
                self._skipped_in_backward.append(layer.name)
                for state, _ in steps:
                    self._optimizer_state[state.parameter]["step"] -= 1
            return finite

        if steps:
            layer.gate.close_until(self._submit(layer.unit, None, steps, before=gradients_are_finite))
            self._stepped_in_backward |= {id(state.parameter): arguments for state, arguments in steps}


class MasterStep(HostStep):
    """Any other torch optimizer: its own ``step()``, on fp32 masters on the host. Serial, and not fused."""

    def step(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> Any:
        """Shows the optimizer fp32 masters and gradients in the place of the weights, and writes back what it made.

        Takes 8 bytes a parameter of host memory while it runs, besides the optimizer's own state.
        """
        runtime = self.runtime
        runtime.worker.raise_if_failed()
        runtime.refresh_if_written()
        runtime.collect_gradients()
        found = self.with_gradients(optimizer)
        norm = float(runtime.total_norm([state.parameter for state, _ in found]))
        factors = runtime.take_clip_factors(self.parameters(optimizer))
        self._forget_norms(optimizer)
        if not self.allows(norm):
            return None
        owners = {id(state): (unit, gate, group) for unit, gate, group in runtime.in_forward_order() for state in unit.states}
        shown: list[tuple[ParameterState, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        touched: dict[int, tuple[HostUnit, ResidentGroup | None]] = {}
        for state, _ in found:
            unit, _, group = owners[id(state)]
            assert state.gradient is not None
            master = unit.read_master(state)
            gradient = state.gradient.float() * factors.get(id(state.parameter), 1.0)
            shown.append((state, master, state.parameter.data, state.parameter.grad))
            state.parameter.grad = None
            state.parameter.data = master
            state.parameter.grad = gradient
            touched[id(unit)] = (unit, group)
        try:
            result = own_step()
        finally:
            for state, master, weight, gradient_before in shown:
                state.parameter.grad = None
                state.parameter.data = weight
                state.parameter.grad = gradient_before
                owners[id(state)][0].write_master(state, master)
                state.seen_version = state.parameter._version
            for unit, group in touched.values():
                unit.version += 1
                if group is not None:
                    issued_event = runtime.streams.event()
                    issued_event.record(runtime.streams.compute_stream)
                    runtime.meter.counters.h2d_bytes += group.device_bytes
                    group.push_weights(issued_event)
            runtime.drain()
        return result


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


def adopt_optimizer(optimizer: Optimizer, runtime: StreamingRuntime, schedule: str) -> HostStep:
    """Makes ``optimizer`` step on the host store of ``runtime``. Its identity, groups and defaults stay.

    Args:
        optimizer: any ``torch.optim.Optimizer`` over trained parameters of the model.
        runtime: the model's engine.
        schedule: ``deferred``, ``backward`` or ``serial``; other optimizers than Adam and AdamW are always serial.

    Raises:
        UnsupportedError: it holds parameters that the model doesn't train.
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

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = _run_closure(closure)
        with torch.no_grad():
            driver.step(self)
        return loss

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none:
            runtime.drain()  # a deferred step may still read the gradients
        original.zero_grad(self, set_to_none)

    def state_dict(self: Optimizer) -> dict[str, Any]:
        runtime.drain()
        return original.state_dict(self)

    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        runtime.drain()
        # Weights that were loaded before are taken over now: seen later, they would reset the residuals loaded here.
        runtime.refresh_if_written()
        # torch's own way would cast the moments to the weights' dtype and device, and hold a second copy.
        original.load_state_dict(self, {"state": {}, "param_groups": state_dict["param_groups"]})
        driver.bind(self)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(saved, driver.parameters(self), strict=True):
            state = runtime.state_of(parameter)
            if state is not None:
                driver.import_state(state, state_dict["state"].get(key) or {})

    members = {"step": step, "zero_grad": zero_grad, "state_dict": state_dict, "load_state_dict": load_state_dict}
    optimizer.__class__ = _swapped_class(optimizer, {**members, "_megatrain_original_class": original})
    return driver


def _adopt_other(optimizer: Optimizer, runtime: StreamingRuntime) -> MasterStep:
    driver = MasterStep(optimizer, runtime)
    original = type(optimizer)
    own_step = getattr(original.step, "__wrapped__", original.step)
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
        return original.state_dict(self)

    members = {"step": step, "state_dict": state_dict, "_megatrain_original_class": original}
    optimizer.__class__ = _swapped_class(optimizer, members)
    return driver

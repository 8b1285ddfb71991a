"""What every host optimizer does before its arithmetic: it finds its parameters, their gradients, and the norm that allows a
step. Parameters of other modules (a loss, a head) are on the device, where the optimizer's own ``step()`` steps them."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from megatrain_accelerate.errors import NonFiniteGradientError, StateError, UnsupportedError
from megatrain_accelerate.gradients.offload import UnitStepper
from megatrain_accelerate.layers.runtime import StreamingRuntime, streamed_among
from megatrain_accelerate.optim.moment_states import RESIDUAL_KEY, RESIDUALS_KEY
from megatrain_accelerate.store.parameter import ParameterState

logger = logging.getLogger(__name__)

MOST_NONFINITE_STEPS = 5
"""The run stops at so many steps in a row with a non-finite gradient norm. Fewer are skipped."""

TAKEN_OVER = (
    "another optimizer has taken over parameters of this one, and only one at a time can step them; call "
    "accelerator.prepare(optimizer) before it steps again (it goes on with its own moments), or use one with several groups"
)
ANOTHER_MODELS = (
    "the optimizer holds {} trained parameters of another streamed model, and one optimizer can't step two of these; give "
    "each model an optimizer of its own"
)
ENGINE_CLOSED = (
    "the model was changed or prepared anew since this optimizer was prepared, and what the optimizer stepped is gone; call "
    "accelerator.prepare(model, optimizer) before it steps again (it goes on with its own moments)"
)


Found = tuple[ParameterState, dict[str, Any]]
"""A parameter that has a gradient, with its group in the optimizer."""


def driver_of(optimizer: Optimizer) -> HostStep | None:
    """Returns what stepped the optimizer last on a host store, or None if nothing ever did."""
    return optimizer.__dict__.get("_megatrain_driver")


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """The parameters that an optimizer holds, in group order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class HostStep(UnitStepper):
    """Base class of both host optimizers: the parameters they hold, their gradients as a whole, non-finite norms."""

    def __init__(self, optimizer: Optimizer, runtime: StreamingRuntime) -> None:
        self.runtime = runtime
        self._nonfinite_in_a_row = 0
        self._why_retired: str | None = None
        self.is_at_work = False
        """Whether it is the driver itself that reads the optimizer's ``state`` now, which waits for no steps."""
        self._optimizer_ref = weakref.ref(optimizer)
        before = driver_of(optimizer)
        self._trained_before = before.parameter_ids if before is not None else set()
        self.parameter_ids: set[int] = set()
        """``id`` of each of the model's parameters that the optimizer has held since it was adopted."""
        self.hold(parameters_of(optimizer))
        optimizer.__dict__["_megatrain_driver"] = self
        runtime.steppers.append(self)

    def hold(self, parameters: Sequence[torch.Tensor]) -> None:
        """Makes the optimizer hold these parameters, too. Trained ones of other modules are moved to the device, where they
        are stepped. The model's own that were frozen when it was prepared wait until it is prepared anew. Those that have left
        it stay on the host until they get a gradient. An ``UnsupportedError`` for trained ones of another streamed model."""
        waiting = [p for p in parameters if p.requires_grad and id(p) not in self._trained_before]
        outside = [p for p in waiting if self.runtime.state_of(p) is None]
        self._refuse_another_models(outside)
        device = self.runtime.streams.device
        for parameter in outside:
            if parameter.device.type == "cpu" and device.type != "cpu":
                gradient, parameter.grad = parameter.grad, None
                parameter.data = parameter.data.to(device)
                parameter.grad = gradient if gradient is None else gradient.to(device)
        was_trained = {id(p) for p in parameters if id(p) in self._trained_before and p.grad is None}
        self.parameter_ids |= was_trained | {id(p) for p in parameters if self.runtime.trains(p)}

    def _refuse_another_models(self, parameters: Sequence[torch.Tensor]) -> None:
        if strangers := len(streamed_among(parameters)):
            raise UnsupportedError(ANOTHER_MODELS.format(strangers))

    @property
    def optimizer(self) -> Optimizer | None:
        """The user's optimizer. The reference is weak: being stepped here doesn't keep it alive."""
        return self._optimizer_ref()

    @property
    def is_retired(self) -> bool:
        return self._why_retired is not None

    def retire(self, why: str, copies: bool = False) -> None:
        """Ends this driver: it begins no more steps. Those it took must be applied. ``why``: TAKEN_OVER or ENGINE_CLOSED.
        With ``copies`` the optimizer's ``state`` gets tensors of its own, since the store goes on without it."""
        self._why_retired = why
        self.runtime.steppers.remove(self)

    def begin_step(self) -> None:
        """Brings weights that somebody wrote to, and gradients in flight, to where a step reads them. Raises if :meth:`retire`
        was called, or an earlier step failed."""
        if self._why_retired is not None:
            raise StateError(self._why_retired)
        self.runtime.watch.end()
        self.runtime.worker.raise_if_failed()
        self.runtime.wait_for_fetches()
        self.runtime.refresh_if_written()
        self.runtime.collect_gradients()
        # For gradients that no backward brought: a script may have set them.
        units = (unit for unit in self.runtime.units if any(state.parameter.grad is not None for state in unit.states))
        self.runtime.offloader.allocate_gradients(units)

    def by_key(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterable[tuple[Any, torch.nn.Parameter]]:
        """Pairs of a key in a ``state_dict()``, which the optimizer made or is to load, and the parameter."""
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        return zip(saved, parameters_of(optimizer), strict=False)  # torch itself refuses lengths that differ

    def saved(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the optimizer's ``state_dict()`` with the residuals of all masters, unless another optimizer steps these.
        No parameter gets an entry for that: the optimizer would take it for a state that it made."""
        if self.is_retired:
            return state_dict
        entries, left = dict(state_dict["state"]), {}
        for key, parameter in self.by_key(optimizer, state_dict):
            state = self.runtime.state_of(parameter)
            if state is None or state.residual is None:
                continue
            if key in entries:
                entries[key] = {**entries[key], RESIDUAL_KEY: state.residual}
            elif not self.runtime.owner_of(state).unit.is_blank("residuals"):
                left[key] = state.residual
        return {**state_dict, "state": entries, **({RESIDUALS_KEY: left} if left else {})}

    def load_residuals(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Sets the masters' residuals that a ``state_dict()`` has, unless another optimizer steps these masters."""
        if self.is_retired:
            return
        left = state_dict.get(RESIDUALS_KEY, {})
        for key, parameter in self.by_key(optimizer, state_dict):
            residual = (state_dict["state"].get(key) or {}).get(RESIDUAL_KEY, left.get(key))
            if residual is not None and (state := self.runtime.state_of(parameter)) is not None:
                unit = self.runtime.owner_of(state).unit
                unit.bring_states()
                unit.write_residual(state, residual)

    def with_gradients(self, optimizer: Optimizer) -> tuple[list[Found], list[torch.nn.Parameter]]:
        """Returns the model's and other modules' parameters with a gradient, in group order. Copies foreign gradient tensors
        into the store, and moves other modules' states to their parameters' devices. Raises an UnsupportedError for a gradient
        of a parameter that was frozen when the model was prepared, or of another streamed model."""
        found, outside = [], []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if (state := self.runtime.state_of(parameter)) is None:
                    _bring_beside(optimizer.state.get(parameter) or {}, parameter, group)
                    outside.append(parameter)
                    continue
                if state.row is None:
                    raise UnsupportedError(
                        f"parameter {state.name} got a gradient, but was frozen when the model was last called and has no "
                        "memory for gradients; unfreeze it before the model is called"
                    )
                if state.has_foreign_gradient and parameter.data_ptr() == state.weight.data_ptr():
                    assert state.gradient is not None
                    self.runtime.drain()  # WAR: a step that isn't applied yet may read it
                    state.gradient.copy_(parameter.grad)
                found.append((state, group))
        self._refuse_another_models(outside)
        return found, outside

    def norm_and_factors(
        self, optimizer: Optimizer, found: Sequence[Found], outside: Sequence[torch.Tensor]
    ) -> tuple[float, dict[int, float]]:
        """The norm of all these gradients, and the clip factors by ``id`` of the parameter. Both count for one step."""
        norm = float(self.runtime.clipping.total_norm([*(state.parameter for state, _ in found), *outside]))
        if outside and (exchange := self.runtime.offloader.exchange) is not None:
            exchange.require_equal(norm)
        factors = self.runtime.clipping.take_factors(set(map(id, parameters_of(optimizer))))
        for state, _ in found:
            state.normed = None
        return norm, factors

    def allows(self, norm: float) -> bool:
        """Whether a step with this global norm may be taken. Counts the step, or warns. Raises a ``NonFiniteGradientError`` if
        the norm is the last of too many non-finite ones in a row."""
        if math.isfinite(norm):
            self._nonfinite_in_a_row = 0
            self.runtime.steps_taken += 1
            return True
        self._nonfinite_in_a_row = in_a_row = self._nonfinite_in_a_row + 1
        self.runtime.meter.counters.skipped_steps += 1
        if in_a_row >= MOST_NONFINITE_STEPS:
            raise NonFiniteGradientError(
                f"the gradient norm was not finite ({norm}) in {in_a_row} steps in a row; the weights are those of the last "
                "good step. Lower the learning rate or check the data"
            )
        allowed = MOST_NONFINITE_STEPS - 1
        logger.warning("megatrain: gradient norm is %s, step skipped (%d in a row, %d allowed)", norm, in_a_row, allowed)
        return False


def _bring_beside(entry: dict[str, Any], parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
    """Moves the tensors of an optimizer's state for a parameter to the parameter's device."""
    step_is_on_device = bool(group.get("capturable") or group.get("fused"))  # else torch keeps it on the host
    for key, value in entry.items():
        if isinstance(value, torch.Tensor) and (key != "step" or step_is_on_device):
            entry[key] = value.to(parameter.device)


@contextlib.contextmanager
def narrowed_to(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Removes all other parameters from the optimizer's groups while the body runs."""
    ids = {id(parameter) for parameter in parameters}
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in ids]
        yield
    finally:
        for group, held in zip(optimizer.param_groups, before, strict=True):
            group["params"] = held

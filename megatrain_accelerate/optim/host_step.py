"""What every host optimizer does before its arithmetic: its parameters, their gradients, the norm that allows a step."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from megatrain_accelerate.errors import NonFiniteGradientError, StateError, UnsupportedError
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.streaming.runtime import StreamingRuntime

logger = logging.getLogger(__name__)

TAKEN_OVER = (
    "another optimizer has taken over parameters of this one since it was prepared, and only one at a time can step them; "
    "call accelerator.prepare(optimizer) before it steps again (it goes on with its own moments), or use one optimizer with "
    "several param_groups"
)
ENGINE_CLOSED = (
    "the model was changed or prepared anew since this optimizer was prepared, and what the optimizer stepped is gone; call "
    "accelerator.prepare(model, optimizer) before it steps again (it goes on with its own moments)"
)


def driver_of(optimizer: Optimizer) -> HostStep | None:
    """What stepped the optimizer last on a host store, or None if nothing ever did."""
    driver: HostStep | None = optimizer.__dict__.get("_megatrain_driver")
    return driver


class HostStep:
    """What both kinds of host optimizer share: finding parameters, gradients as a whole, non-finite norms.

    Args:
        optimizer: the user's optimizer.
        runtime: the engine of the model whose parameters it holds.

    Raises:
        UnsupportedError: the optimizer holds parameters that aren't this model's trained ones. The model's frozen ones, and
            those that it trained before and that have left the model, may stay in it while they have no gradient.
    """

    def __init__(self, optimizer: Optimizer, runtime: StreamingRuntime) -> None:
        self.runtime = runtime
        self._nonfinite_in_a_row = 0
        self._why_retired: str | None = None
        self._optimizer_ref = weakref.ref(optimizer)
        before = driver_of(optimizer)
        self._trained_before = before.parameter_ids if before is not None else set()
        self.parameter_ids: set[int] = set()
        """``id`` of each parameter that the optimizer has held since it was adopted."""
        self.hold(self.parameters(optimizer))
        optimizer.__dict__["_megatrain_driver"] = self

    def hold(self, parameters: Sequence[torch.Tensor]) -> None:
        """The optimizer holds these parameters from now on, too.

        Raises:
            UnsupportedError: some aren't this model's trained ones; none is held then. See :class:`HostStep`.
        """
        held = [parameter for parameter in parameters if self._is_trained(parameter)]
        strangers = sum(not self._is_trained(parameter) and not self._is_frozen(parameter) for parameter in parameters)
        if strangers:
            raise UnsupportedError(
                f"the optimizer holds {strangers} parameters that the prepared model doesn't train (frozen when it was "
                "prepared and not now, or another module's); give them an optimizer of their own, or unfreeze them before "
                "accelerator.prepare()"
            )
        self.parameter_ids |= {id(parameter) for parameter in held}

    def _is_trained(self, parameter: torch.Tensor) -> bool:
        """Whether it is now, or was before: then it may stay while it has no gradient."""
        was_trained = id(parameter) in self._trained_before and parameter.grad is None
        return was_trained or self.runtime.norms.row(parameter) is not None

    def _is_frozen(self, parameter: torch.Tensor) -> bool:
        """Whether it is the model's, and no step will touch it."""
        is_ours = self.runtime.state_of(parameter) is not None
        return is_ours and not parameter.requires_grad and parameter.grad is None

    @property
    def optimizer(self) -> Optimizer | None:
        """The user's optimizer, which lives no longer for being stepped here."""
        return self._optimizer_ref()

    @property
    def is_retired(self) -> bool:
        """Whether no step can be taken from here any more."""
        return self._why_retired is not None

    def retire(self, why: str, copies: bool = False) -> None:
        """No step is begun from here any more. All steps that were taken must be applied.

        What the optimizer needs to go on elsewhere stays in its ``state``.

        Args:
            why: :data:`TAKEN_OVER` or :data:`ENGINE_CLOSED`.
            copies: the store goes on without this optimizer, whose ``state`` is to be its own from now on.
        """
        self._why_retired = why

    def refuse_retired(self) -> None:
        """Nobody may step from here after :meth:`retire`.

        Raises:
            StateError: it is so, with the reason.
        """
        if self._why_retired is not None:
            raise StateError(self._why_retired)

    def parameters(self, optimizer: Optimizer) -> list[torch.nn.Parameter]:
        """All parameters of the optimizer, in group order."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def by_key(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterable[tuple[Any, torch.nn.Parameter]]:
        """Each parameter with its key in a ``state_dict()`` of the optimizer, or one that it loads."""
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        return zip(saved, self.parameters(optimizer), strict=False)  # where the lengths differ torch refuses it

    def with_gradients(self, optimizer: Optimizer) -> list[tuple[ParameterState, dict[str, Any]]]:
        """(place, group) of every parameter that has a gradient; brings foreign gradient tensors into the store."""
        found = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.runtime.state_of(parameter)
                if state is None or not state.entry.spec.trainable:
                    raise UnsupportedError(
                        "a parameter was added to the optimizer after the model was prepared; unfreeze it before "
                        "accelerator.prepare()"
                    )
                if parameter.data_ptr() == state.weight.data_ptr() and state.has_foreign_gradient:
                    assert state.gradient is not None
                    self.runtime.drain()  # a step that is still to be applied may read the place
                    state.gradient.copy_(parameter.grad)
                found.append((state, group))
        return found

    def forget_norms(self, optimizer: Optimizer) -> None:
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

"""What every host optimizer does before its arithmetic: its parameters, their gradients, the norm that allows a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from megatrain_accelerate.errors import NonFiniteGradientError, UnsupportedError
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.streaming.runtime import StreamingRuntime

logger = logging.getLogger(__name__)


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
        self.parameter_ids: set[int] = set()
        """``id`` of each parameter that the optimizer has held since it was adopted."""
        self.hold(self.parameters(optimizer))

    def hold(self, parameters: Sequence[torch.Tensor]) -> None:
        """The optimizer holds these parameters from now on, too.

        Raises:
            UnsupportedError: some aren't this model's trained ones; none is held then.
        """
        strangers = sum(self.runtime.norms.row(parameter) is None for parameter in parameters)
        if strangers:
            raise UnsupportedError(
                f"the optimizer holds {strangers} parameters that the prepared model doesn't train (frozen when it was "
                "prepared, or another module's); give them an optimizer of their own, or unfreeze them before "
                "accelerator.prepare()"
            )
        self.parameter_ids |= {id(parameter) for parameter in parameters}

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
                if state is None or not state.entry.spec.trainable:
                    raise UnsupportedError(
                        "a parameter was added to the optimizer after the model was prepared; unfreeze it before "
                        "accelerator.prepare()"
                    )
                place = state.gradient if parameter.data_ptr() == state.weight.data_ptr() else None
                if place is not None and parameter.grad.data_ptr() != place.data_ptr():
                    self.runtime.drain()  # a step that is still to be applied may read the place
                    place.copy_(parameter.grad)
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

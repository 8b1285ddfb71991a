"""Clipping by the global norm without another pass over the gradients: a factor that the next step multiplies in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.streaming.fp32_sums import Fp32Sums
from megatrain_accelerate.streaming.norm_table import NormTable


class Clipping:
    """Owner of the factors by which clipped gradients are to be scaled, until a step takes them.

    Args:
        norms: the norms of all gradients.
        sums: how the gradients are summed.
        states: the parameters' places in the store, by ``id`` of the parameter.
    """

    def __init__(self, norms: NormTable, sums: Fp32Sums, states: Mapping[int, ParameterState]) -> None:
        self._norms = norms
        self._sums = sums
        self._states = states
        self._factors: dict[int, tuple[torch.Tensor, float]] = {}

    def total_norm(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """See :meth:`StreamingRuntime.total_norm`; the gradients' norms must have arrived."""
        rows, factors = [], []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            row = self._norms.row(parameter)
            if row is None:
                raise StateError("total_norm() was given a parameter that this engine doesn't train")
            if not self._norms.is_current(parameter):
                self._norms.norms[row] = self._sums.norms([self._states[id(parameter)]])[0]
                self._norms.note(parameter, parameter.grad, rewritten=True)
            rows.append(row)
            factors.append(self._factors.get(id(parameter), (parameter, 1.0))[1])
        if not rows:
            return torch.zeros(())
        norms = self._norms.norms[torch.tensor(rows)]
        if self._factors:
            norms = norms * torch.tensor(factors, dtype=torch.float32)
        return torch.linalg.vector_norm(norms, 2.0)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """See :meth:`StreamingRuntime.clip_grad_norm`; the gradients' norms must have arrived."""
        parameters = list(parameters)
        total = self.total_norm(parameters)
        # As torch.nn.utils.clip_grad_norm_ does it, in fp32.
        factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        if bool(total.isfinite()) and factor != 1.0:
            for parameter in parameters:
                _, earlier = self._factors.get(id(parameter), (parameter, 1.0))
                self._factors[id(parameter)] = (parameter, factor * earlier)
        return total

    def take_factors(self, parameters: Iterable[torch.Tensor]) -> dict[int, float]:
        """The factors that were asked for since these parameters' last step, by ``id``; 1 where absent."""
        taken = {id(parameter): self._factors.pop(id(parameter), None) for parameter in parameters}
        return {key: item[1] for key, item in taken.items() if item is not None}

    def settle(self) -> None:
        """Scales clipped gradients that no step took, since others may be added; forgets those that were dropped."""
        self.refuse_written()
        for parameter, factor in self._factors.values():
            if parameter.grad is not None:
                with torch.no_grad():
                    self._sums.scale(self._states[id(parameter)], factor)
                self._norms.forget(parameter)
        self._factors.clear()

    def refuse_written(self) -> None:
        """What was written would be scaled along with the gradient.

        Raises:
            StateError: a parameter's gradient was clipped, and written to or replaced since.
        """
        for parameter, _ in self._factors.values():
            if parameter.grad is not None and not self._norms.is_current(parameter):
                raise StateError(
                    "gradients were written to after accelerator.clip_grad_norm_(), which leaves them as they are and lets "
                    "the step scale them; change them before they are clipped, or clip with torch.nn.utils.clip_grad_norm_()"
                )

    def refuse_clipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Gradients that were clipped can't be added to: the factor would hold for both parts.

        Raises:
            StateError: one of them was clipped since the last step.
        """
        if not self._factors:
            return
        for parameter in parameters:
            if id(parameter) in self._factors:
                raise StateError(
                    f"backward would add to gradients that were clipped (factor {self._factors[id(parameter)][1]:.3g}) "
                    "and not stepped or zeroed; clip once, after the last backward before optimizer.step()"
                )

"""The norms of all gradients, and clipping: a factor with which the next step multiplies gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.gradients.fp32_sums import Fp32Sums
from megatrain_accelerate.store.host_memory import HostMemory
from megatrain_accelerate.store.parameter import NotedTensor, ParameterState
from megatrain_accelerate.store.unit import HostUnit


class NormTable:
    """Host table of each trained parameter's last gradient norm, in the ``row`` of its state. Owner: the runtime.
    Writers: the d2h stream, the step worker. Reader: the launching thread, after backward."""

    def __init__(self, units: Sequence[HostUnit], register: bool) -> None:
        trained = [state for unit in units for state in unit.states if state.entry.spec.trainable]
        for row, state in enumerate(trained):
            state.row = row
        count = max(1, len(trained))
        memory = HostMemory(4 * count, register=register)
        memory.register()
        self.norms = memory.tensor(0, (count,), torch.float32)
        self.close = memory.close

    def copies(self, states: Sequence[ParameterState], norms: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Which rows of the table these parameters' ``norms`` on the device are copied to, in as few copies as possible."""
        rows = [row for state in states if (row := state.row) is not None]
        if rows == list(range(rows[0], rows[-1] + 1)):
            return [(self.norms[rows[0] : rows[-1] + 1], norms)]
        return [(self.norms[row], norm) for row, norm in zip(rows, norms.unbind(), strict=True)]


class Clipping:
    """Owner of the clip factors until a step takes them. ``states``: the states of the model's parameters, by ``id`` of the
    parameter."""

    def __init__(self, norms: NormTable, sums: Fp32Sums, states: Mapping[int, ParameterState]) -> None:
        self._norms = norms
        self._sums = sums
        self._states = states
        self.factors: dict[int, float] = {}
        """The factor of each clipped parameter, by its ``id``."""
        self.stepped: list[tuple[ParameterState, float, NotedTensor]] = []
        """Each parameter that was stepped with a factor since the last forward, the factor, and its gradient at that time."""

    def total_norm(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Global 2-norm of the parameters' gradients, which must have been collected: an fp32 scalar tensor on the host. It is
        what ``torch.nn.utils.clip_grad_norm_`` gives on fp32 gradients: the norm of the gradients' norms. ``parameters`` are
        trained ones of this model, or of modules that don't stream. Those without a gradient don't count."""
        rows, factors, outside = [], [], []
        for parameter in parameters:
            if (gradient := parameter.grad) is None:
                continue
            state = self._states.get(id(parameter))
            if state is None or state.row is None:
                outside.append(torch.linalg.vector_norm(gradient.detach(), 2.0, dtype=torch.float32))
                continue
            if (normed := state.normed) is None or not normed.is_still(gradient):
                self._norms.norms[state.row] = self._sums.norms([state])[0]
                state.note_norm(gradient, rewritten=True)
            rows.append(state.row)
            factors.append(self.factors.get(id(parameter), 1.0))
        norms = self._norms.norms[torch.tensor(rows, dtype=torch.long)] * torch.tensor(factors, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.cat([norms, *(norm.cpu().reshape(1) for norm in outside)]), 2.0)

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """See :meth:`StreamingRuntime.clip_grad_norm`. The gradients' norms must have arrived on the host."""
        total = self.total_norm(parameters)
        # The formula of torch.nn.utils.clip_grad_norm_, in fp32.
        factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        if bool(total.isfinite()) and factor != 1.0:
            for parameter in parameters:
                if id(parameter) in self._states:
                    self.factors[id(parameter)] = factor * self.factors.get(id(parameter), 1.0)
                elif parameter.grad is not None:
                    parameter.grad.detach().mul_(factor)
        return total

    def take_factors(self, ids: Collection[int]) -> dict[int, float]:
        """Removes and returns the factors that wait for a step of these parameters, by ``id``. A missing one is 1. The
        gradients stay unscaled: :meth:`settle` scales those that are still there after the step."""
        taken: dict[int, float] = {}
        for key in [key for key in self.factors if key in ids]:
            state, factor = self._states[key], self.factors.pop(key)
            if factor != 1.0 and state.parameter.grad is not None:
                assert state.normed is not None
                taken[key] = factor
                self.stepped.append((state, factor, state.normed))
        return taken

    def has_unscaled(self) -> bool:
        """Whether there are clipped gradients that haven't been scaled."""
        return bool(self.factors) or self.has_stepped()

    def has_stepped(self) -> bool:
        """Whether clipped gradients are still there, unscaled, after their step."""
        self.stepped = [stepped for stepped in self.stepped if stepped[2].is_still(stepped[0].parameter.grad)]
        return bool(self.stepped)

    def settle_stepped(self, more_gradients_follow: bool) -> None:
        """Does what :meth:`settle` does for gradients that were stepped and not dropped."""
        if self.has_stepped():
            for state, factor, _ in self.stepped:
                self._sums.scale(state, factor, more_gradients_follow)
            self.stepped.clear()

    def settle(self, more_gradients_follow: bool) -> None:
        """Scales clipped gradients in place, before somebody reads them or adds to them. No step may be in flight. If
        ``more_gradients_follow``, bf16 ones become fp32 sums where these are wanted. Otherwise what isn't a sum is rounded
        once more."""
        self.refuse_written()
        self.settle_stepped(more_gradients_follow)
        for key, factor in self.factors.items():
            if (state := self._states[key]).parameter.grad is not None:
                self._sums.scale(state, factor, more_gradients_follow)
        self.factors.clear()

    def refuse_written(self) -> None:
        """Raises a StateError if a clipped gradient was written to, since the step would scale what was written, too."""
        clipped = [self._states[key] for key in self.factors]
        if any(state.parameter.grad is not None and not state.has_norm for state in clipped):
            raise StateError(
                "gradients were written to after accelerator.clip_grad_norm_(), which leaves them as they are and lets "
                "the step scale them; change them before they are clipped, or clip with torch.nn.utils.clip_grad_norm_()"
            )

"""The norms of all gradients, and clipping by a factor that the next step multiplies in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.memory.parameter_state import NotedTensor, ParameterState
from megatrain_accelerate.streaming.fp32_sums import Fp32Sums


class NormTable:
    """Host table of the last gradient norm of every trainable parameter.

    Owner: the runtime. Writers: the d2h stream, the step worker. Reader: the launching thread, after backward.
    """

    def __init__(self, units: Sequence[HostUnit], register: bool) -> None:
        self._start: dict[int, int] = {}
        self._row: dict[int, int] = {}
        count = 0
        for unit in units:
            self._start[id(unit)] = count
            for state in unit.states:
                if state.entry.spec.trainable:
                    self._row[id(state.parameter)] = count
                    count += 1
        self._memory = HostMemory(4 * max(1, count), huge_pages=False, register=register)
        self._memory.register()
        self.norms = self._memory.tensor(0, (max(1, count),), torch.float32)
        self._noted: dict[int, NotedTensor] = {}
        self._rewritten: set[int] = set()

    def note(self, parameter: torch.Tensor, gradient: torch.Tensor, rewritten: bool = False) -> None:
        """The parameter's row holds, or will hold once its copy is over, the norm of ``gradient`` as it is now.

        It is ``rewritten`` if a script wrote to it or replaced it since the last backward.
        """
        self._noted[id(parameter)] = NotedTensor(gradient)
        (self._rewritten.add if rewritten else self._rewritten.discard)(id(parameter))

    def is_current(self, parameter: torch.Tensor) -> bool:
        """Whether the row is the norm of ``parameter.grad``; not so if somebody wrote to it or replaced it."""
        noted = self._noted.get(id(parameter))
        return noted is not None and noted.is_still(parameter.grad)

    def noted(self, parameter: torch.Tensor) -> NotedTensor:
        """The gradient whose norm the row is."""
        return self._noted[id(parameter)]

    def is_from_backward(self, parameter: torch.Tensor) -> bool:
        """Whether the row is current and the gradient what the last backward left."""
        return self.is_current(parameter) and id(parameter) not in self._rewritten

    def forget(self, parameter: torch.Tensor) -> None:
        """The parameter's row isn't valid any more: its gradient was consumed by a step, or is another one."""
        self._noted.pop(id(parameter), None)
        self._rewritten.discard(id(parameter))

    def of_unit(self, unit: HostUnit) -> torch.Tensor:
        """The unit's rows: one for each trainable entry, in entry order."""
        start = self._start[id(unit)]
        return self.norms[start : start + len(unit.layout.trainable_entries)]

    def row(self, parameter: torch.Tensor) -> int | None:
        """The row of a parameter, or None if it isn't a trained one of this model."""
        return self._row.get(id(parameter))

    def close(self) -> None:
        self._memory.close()


class Clipping:
    """Owner of the factors by which clipped gradients are to be scaled, until a step takes them.

    ``states`` are the parameters' places in the store, by ``id`` of the parameter.
    """

    def __init__(self, norms: NormTable, sums: Fp32Sums, states: Mapping[int, ParameterState]) -> None:
        self._norms = norms
        self._sums = sums
        self._states = states
        self._factors: dict[int, tuple[torch.Tensor, float]] = {}
        """Each clipped parameter and its factor, by ``id``."""
        self._stepped: list[tuple[torch.Tensor, float, NotedTensor]] = []
        """Each parameter that was stepped with a factor since the last forward, the factor, and its gradient then."""

    def total_norm(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Global 2-norm of the parameters' gradients, which must have been collected: fp32, on the host, no dimensions.

        The value of ``torch.nn.utils.clip_grad_norm_`` on fp32 gradients: the norm of the gradients' norms. ``parameters`` are
        trained ones of this model, or of modules that don't stream; those without a gradient don't count.
        """
        rows, counted, outside = [], [], []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            row = self._norms.row(parameter)
            if row is None:
                outside.append(torch.linalg.vector_norm(parameter.grad.detach(), 2.0, dtype=torch.float32))
                continue
            if not self._norms.is_current(parameter):
                self._norms.norms[row] = self._sums.norms([self._states[id(parameter)]])[0]
                self._norms.note(parameter, parameter.grad, rewritten=True)
            rows.append(row)
            counted.append(parameter)
        norms = self._norms.norms[torch.tensor(rows, dtype=torch.long)]
        if self._factors:
            factors = [self._factors[id(p)][1] if id(p) in self._factors else 1.0 for p in counted]
            norms = norms * torch.tensor(factors, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.cat([norms, *(norm.cpu().reshape(1) for norm in outside)]), 2.0)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """See :meth:`StreamingRuntime.clip_grad_norm`; the gradients' norms must have arrived."""
        parameters = list(parameters)
        total = self.total_norm(parameters)
        # As torch.nn.utils.clip_grad_norm_ does it, in fp32.
        factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        if bool(total.isfinite()) and factor != 1.0:
            for parameter in parameters:
                if id(parameter) in self._states:
                    _, earlier = self._factors.get(id(parameter), (parameter, 1.0))
                    self._factors[id(parameter)] = parameter, factor * earlier
                elif parameter.grad is not None:
                    parameter.grad.detach().mul_(factor)
        return total

    def take_factors(self, parameters: Iterable[torch.Tensor]) -> dict[int, float]:
        """Removes and returns the factors that wait for a step of these parameters, by ``id``; 1 where absent.

        The gradients stay as they are: :meth:`settle` scales those that are still there behind the step.
        """
        taken: dict[int, float] = {}
        for parameter in parameters if self._factors else ():
            _, factor = self._factors.pop(id(parameter), (parameter, 1.0))
            if factor != 1.0 and parameter.grad is not None:
                taken[id(parameter)] = factor
                self._stepped.append((parameter, factor, self._norms.noted(parameter)))
        return taken

    @property
    def is_pending(self) -> bool:
        return bool(self._factors or self._stepped)

    def has_unscaled(self) -> bool:
        """Whether clipped gradients are left that weren't scaled."""
        return self.has_stepped() or bool(self._factors)

    def has_stepped(self) -> bool:
        """Whether clipped gradients are still there, unscaled, behind their step."""
        self._stepped = [stepped for stepped in self._stepped if stepped[2].is_still(stepped[0].grad)]
        return bool(self._stepped)

    def settle_stepped(self, others_follow: bool) -> None:
        """The part of :meth:`settle` that gradients need which were stepped and not dropped."""
        if self.has_stepped():
            for parameter, factor, _ in self._stepped:
                self._scale(parameter, factor, others_follow)
            self._stepped.clear()

    def _scale(self, parameter: torch.Tensor, factor: float, others_follow: bool) -> None:
        with torch.no_grad():
            self._sums.scale(self._states[id(parameter)], factor, others_follow)
        self._norms.forget(parameter)

    def settle(self, others_follow: bool) -> None:
        """Scales clipped gradients in place, for those who look at them or add to them.

        No step may be under way. If ``others_follow``, which are added, bf16 gradients become fp32
        sums where such sums are wanted; if not, gradients that aren't sums are rounded once more.
        """
        self.refuse_written()
        self.settle_stepped(others_follow)
        for parameter, factor in self._factors.values():
            if parameter.grad is not None:
                self._scale(parameter, factor, others_follow)
        self._factors.clear()

    def refuse_written(self) -> None:
        """A StateError if a clipped gradient was written to: that would be scaled as well."""
        if any(p.grad is not None and not self._norms.is_current(p) for p, _ in self._factors.values()):
            raise StateError(
                "gradients were written to after accelerator.clip_grad_norm_(), which leaves them as they are and lets "
                "the step scale them; change them before they are clipped, or clip with torch.nn.utils.clip_grad_norm_()"
            )

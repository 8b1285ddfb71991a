"""The norms of all gradients on the host, and which of them are still those of ``parameter.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.memory.parameter_state import NotedTensor


class NormTable:
    """Host table of the last gradient norm of every trainable parameter.

    Owner: the runtime. Writers: the d2h stream, the step worker. Reader: the launching thread, after backward.

    Args:
        units: all units, streamed and resident.
        register: page-lock the table.
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

        Args:
            rewritten: the gradient isn't what the last backward left: a script wrote to it or replaced it.
        """
        self._noted[id(parameter)] = NotedTensor(gradient)
        (self._rewritten.add if rewritten else self._rewritten.discard)(id(parameter))

    def is_current(self, parameter: torch.Tensor) -> bool:
        """Whether the row is the norm of ``parameter.grad``; not so if somebody wrote to it or replaced it."""
        noted = self._noted.get(id(parameter))
        return noted is not None and noted.is_still(parameter.grad)

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
        """Unregisters the table."""
        self._memory.close()

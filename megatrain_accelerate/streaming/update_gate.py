"""What readers of a unit's weights wait for, from the moment when its step is submitted until it is applied."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain_accelerate.optim.step_worker import Ticket


class UpdateGate:
    """Guards the weights of a unit, or of a part of one. That of a unit in ``parts`` is open where all of theirs are."""

    def __init__(self, parts: Sequence[UpdateGate] = ()) -> None:
        self._ticket: Ticket | None = None
        self._parts = parts

    def close_until(self, ticket: Ticket) -> None:
        """The weights aren't valid before ``ticket`` is done."""
        self._ticket = ticket
        for part in self._parts:
            part.close_until(ticket)

    @property
    def is_open(self) -> bool:
        """Whether the weights may be read without waiting."""
        if self._ticket is not None and not self._ticket.is_done:
            return False
        return not self._parts or all(part.is_open for part in self._parts)

    def wait(self) -> None:
        """Blocks until the weights are valid.

        Raises:
            StepWorkerError: the step failed.
        """
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
        for part in self._parts:
            part.wait()

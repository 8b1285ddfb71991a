"""What a check found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

STATES = ("ok", "note", "slow", "broken")
"""Fine; worth knowing; makes training slower than it could be; keeps it from running."""

Value = float | int | str | bool | None


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    """What was looked at."""
    state: str
    """One of :data:`STATES`."""
    text: str
    """What was found, with the numbers."""
    remedy: str = ""
    """What to do; empty where nothing has to be done."""
    values: dict[str, Value] = dataclasses.field(default_factory=dict)
    """The numbers for programs; units are in the names."""

    def __post_init__(self) -> None:
        assert self.state in STATES, self.state


def found_by(name: str, check: Callable[[], Sequence[Finding]]) -> list[Finding]:
    """The findings of a check; one that fails is a finding itself, and the others go on."""
    try:
        return list(check())
    except Exception as error:
        text = f"can't be checked: {type(error).__name__}: {error}"
        return [Finding(name, "broken", text, "mend what the message says, and run megatrain doctor again")]

"""What a training chose that changes its numbers: its checkpoints hold it, and a training that is resumed goes on with it."""

from __future__ import annotations

from typing import Any

STATE_KEY = "MegatrainCallback"
"""Of ``TrainerState.stateful_callbacks``, which checkpoints hold, and which a Trainer without the plugin passes over."""


def recorded_choice(training: Any, name: str) -> Any:
    """The choice that was recorded under this name; None if there is none.

    Args:
        training: the Trainer's state.
        name: of the choice.
    """
    return training.stateful_callbacks.get(STATE_KEY, {}).get("attributes", {}).get(name)


def record_choice(training: Any, name: str, choice: Any) -> None:
    """Records a choice beside the others; ``choice`` can be written as JSON."""
    record = training.stateful_callbacks.setdefault(STATE_KEY, {"args": {}, "attributes": {}})
    record["attributes"][name] = choice

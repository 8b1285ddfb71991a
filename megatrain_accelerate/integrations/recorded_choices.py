"""Records the choices of a training that change its numbers.

Checkpoints hold them, so that a training that is resumed goes on with them.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerState

STATE_KEY = "megatrain_accelerate"
"""The key of our entry in ``TrainerState.stateful_callbacks``, which checkpoints hold. No callback has this name: the Trainer
would make it anew from the entry where it restores callbacks from a checkpoint."""


def recorded_choice(state: TrainerState, name: str) -> Any:
    """Returns the choice that was recorded under ``name``, or None."""
    return state.stateful_callbacks.get(STATE_KEY, {"attributes": {}})["attributes"].get(name)


def record_choice(state: TrainerState, name: str, choice: Any) -> None:
    """Records a choice beside those already there; ``choice`` must be JSON-serializable."""
    # The layout of transformers' ExportableState.
    record = state.stateful_callbacks.setdefault(STATE_KEY, {"args": {}, "attributes": {}})
    record["attributes"][name] = choice

"""What the console shows of a log entry: what the Trainer logs itself, and three figures of the engine's many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PREFIX = "megatrain/"
"""Begins the engine's entries in the Trainer's logs."""

_SHOWN = {"tokens_per_second": "tokens_per_second", "gpu_peak_gib": "gpu_gib", "host_peak_gib": "host_gib"}
"""Maps an entry to its name on the console."""


def on_log(
    original: Callable[..., None],
    callback: Any,
    args: Any,
    state: Any,
    control: Any,
    logs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Gives ``on_log`` of a callback that prints a shorter copy of the logs. Trackers and history keep all entries."""
    if logs is not None and any(name.startswith(PREFIX) for name in logs):
        short = {name: value for name, value in logs.items() if not name.startswith(PREFIX)}
        for name, shown in _SHOWN.items():
            if PREFIX + name in logs:
                short.setdefault(shown, logs[PREFIX + name])  # the script may log something of that name itself
        logs = short
    original(callback, args, state, control, logs=logs, **kwargs)

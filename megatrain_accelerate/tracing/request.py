"""How `megatrain trace` asks a training process for a trace, and in which files it comes. Standard library only."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from megatrain_accelerate.errors import ConfigError

ENV_TRACE_DIR = "MEGATRAIN_TRACE_DIR"
"""Folder for the trace; a process without it isn't traced."""
ENV_TRACE_STEP = "MEGATRAIN_TRACE_STEP"
"""The optimizer step to trace, counted from 1."""
DEFAULT_STEP = 5
FIRST_STEP = 2
"""The first step's forward follows no step, so that it has no host step to show."""

RAW_TRACE = "raw_trace.json.gz"
"""The profiler's own trace; deleted when the Perfetto file is made of it."""
RAW_INFO = "raw_trace_info.json"
"""What the profiler doesn't know. Written last: when it is there, so is the trace."""
PERFETTO_TRACE = "trace.perfetto.json.gz"
PICTURE = "timeline.png"

CLOCK_MARK = "megatrain::clock_mark"
"""Spans of the profiler within which the host's clock was read; they tie the two clocks together."""


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """Which step to trace, and the folder for it."""

    folder: Path
    step: int = DEFAULT_STEP

    def __post_init__(self) -> None:
        if self.step < FIRST_STEP:
            raise ConfigError(
                f"step {self.step} can't be traced: a period begins with the step before; use {FIRST_STEP} or more"
            )

    def environment(self) -> dict[str, str]:
        """The variables that hand the request to the processes of a command."""
        return {ENV_TRACE_DIR: str(self.folder.absolute()), ENV_TRACE_STEP: str(self.step)}

    @classmethod
    def from_environment(cls) -> TraceRequest | None:
        """The request that was handed to this process, or None.

        Raises:
            ConfigError: the step isn't a number, or can't be traced.
        """
        folder = os.environ.get(ENV_TRACE_DIR)
        if not folder:
            return None
        step = os.environ.get(ENV_TRACE_STEP, str(DEFAULT_STEP))
        if not step.isdecimal():
            raise ConfigError(f"{ENV_TRACE_STEP} must be a whole number, got {step!r}")
        return cls(Path(folder), int(step))

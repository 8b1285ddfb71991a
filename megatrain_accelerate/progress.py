"""Progress bars and messages that don't break the progress bars of other packages."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from tqdm.auto import tqdm


def progress_bar(total: int, description: str, unit: str, *, show: bool = True, in_logs: str | None = None) -> Any:
    """Makes a progress bar of ``total`` ``unit``s that is removed when it is closed. It is drawn only on a terminal or in a
    notebook, since a log file would keep each of its states, and not if ``TQDM_DISABLE`` is set. ``in_logs`` is printed
    instead if stderr isn't a terminal, even if bars are switched off."""
    # With disable=None tqdm draws only if stderr is a terminal. Passing any value overrides TQDM_DISABLE, so it is read here.
    is_off = True if not show or os.environ.get("TQDM_DISABLE") else None
    bar = tqdm(total=total, desc=f"megatrain: {description}", unit=unit, unit_scale=True, leave=False, disable=is_off)
    if in_logs is not None and bar.disable and not sys.stderr.isatty():
        say(f"megatrain: {in_logs}", sys.stderr)
    return bar


def say(text: str, file: IO[str] | None = None) -> None:
    """Prints text without breaking progress bars that are being drawn; to stdout by default."""
    tqdm.write(text, file=file)
    if file is not None:
        file.flush()

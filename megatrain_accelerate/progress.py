"""What this package draws and prints beside the progress bars of others."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from tqdm.auto import tqdm


def progress_bar(total: int, description: str, unit: str, *, show: bool = True, in_logs: str | None = None) -> Any:
    """Makes a progress bar of so many ``unit``s, which is removed when it is closed. It is drawn on a terminal or in a
    notebook: a log file would keep each state of it. ``TQDM_DISABLE`` switches it off. ``in_logs`` is printed instead if
    stderr isn't a terminal, even if bars are switched off."""
    # To tqdm None means: draw only if stderr is a terminal. A value that is passed overrides TQDM_DISABLE, which is read here.
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

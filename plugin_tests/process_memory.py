"""What this process holds of memory, for tests that bound it. Linux."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from megatrain_accelerate.units import KIB


def _resident(kind: str) -> int:
    match = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * KIB


def anonymous_bytes() -> int:
    """Anonymous memory in RAM: what the process allocated and touched, without files that it maps."""
    return _resident("RssAnon")


def file_bytes() -> int:
    """Pages of mapped files that the process has at hand."""
    return _resident("RssFile")


class PeakMemory:
    """Peak growth of this process's anonymous memory while the body runs, sampled every millisecond."""

    def __enter__(self) -> PeakMemory:
        self._over = threading.Event()
        self._before = anonymous_bytes()
        self.growth = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.growth = max(self.growth, anonymous_bytes() - self._before)

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.growth = max(self.growth, anonymous_bytes() - self._before)

"""The end of ranks that one of them brings about: it is soon over, and no process holds the memory that they shared."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

SECONDS = 5.0
"""Within which all ranks end."""
_MAPPING = re.compile(r"rw-s \S+ (\S+ \d+) +/(?:memfd:megatrain|#\d+) \(deleted\)$", re.MULTILINE)
_TARGET = re.compile(r"/(memfd:megatrain|#\d+) \(deleted\)")


def _held_by(process: int) -> Iterator[str]:
    """Files of shared memory that a process has mapped or open, by device and inode; those of megatrain, and more."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        yield from _MAPPING.findall(Path(f"/proc/{process}/maps").read_text())
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            if _TARGET.fullmatch(os.readlink(descriptor)):
                status = descriptor.stat()
                yield f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino}"


def _holders(files: list[str]) -> list[tuple[int, int]]:
    """Processes that hold any of the files, each with its session."""
    found = []
    for process in (int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
        with contextlib.suppress(ProcessLookupError):
            if not set(files).isdisjoint(_held_by(process)):
                found.append((process, os.getsid(process)))
    return found


def note_cause(path: str | Path) -> None:
    """Called by a rank, shortly before it does what is to end all."""
    files = sorted(set(_held_by(os.getpid())))
    sessions = sorted({session for _, session in _holders(files)})
    Path(path).write_text(json.dumps({"time": time.time(), "files": files, "sessions": sessions}))


def require_prompt_end(path: Path) -> None:
    """Called when all ranks have ended, with the ``path`` that one has given to :func:`note_cause`."""
    noted = json.loads(path.read_text())
    assert time.time() - noted["time"] < SECONDS
    assert noted["files"]
    # Other trainings have other sessions: one that begins now may get the numbers of a file that is gone.
    assert [process for process, session in _holders(noted["files"]) if session in noted["sessions"]] == []

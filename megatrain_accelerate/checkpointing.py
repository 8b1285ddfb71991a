"""Checkpoints that are complete or absent: written aside, flushed to disk, then renamed into place."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from tqdm.auto import tqdm

STAGING_FOLDER = ".megatrain-incomplete"
"""Folder beside the checkpoints in which the next one is written. What a killed run left there is removed."""

_POLL_SECONDS = 0.5


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # files come and go while they are written
            total += path.stat().st_size
    return total


@contextlib.contextmanager
def saving_progress(folder: Path, expected_bytes: int, show: bool) -> Iterator[None]:
    """Draws a bar of what has been written under ``folder`` while the body runs."""
    if not show:
        yield
        return
    done = threading.Event()

    def draw() -> None:
        with tqdm(total=expected_bytes, desc="megatrain: saving", unit="B", unit_scale=True, leave=False) as bar:
            while not done.wait(_POLL_SECONDS):
                bar.update(min(_folder_bytes(folder), expected_bytes) - bar.n)

    thread = threading.Thread(target=draw, name="megatrain-saving-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def remove_incomplete(run_dir: Path) -> None:
    """Removes what an interrupted save left in ``run_dir``."""
    shutil.rmtree(run_dir / STAGING_FOLDER, ignore_errors=True)


def publish(run_dir: Path) -> list[Path]:
    """Moves every checkpoint in the staging folder into place, each by one rename, after it is safely on disk.

    A checkpoint of the same name is replaced; a kill between the two renames leaves the older one in the staging folder
    and the new one complete.

    Returns:
        The checkpoints' folders.
    """
    staging = run_dir / STAGING_FOLDER
    published = []
    for folder in sorted(staging.iterdir()):
        for path in [*folder.rglob("*"), folder]:
            _flush_to_disk(path)
        target = run_dir / folder.name
        if target.exists():
            os.rename(target, staging / f"{folder.name}.replaced")
        os.rename(folder, target)
        published.append(target)
    _flush_to_disk(run_dir)
    shutil.rmtree(staging, ignore_errors=True)
    return published

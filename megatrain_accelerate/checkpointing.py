"""Checkpoints that are complete or absent: written aside, flushed to disk, then renamed into place."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

STAGING_FOLDER = ".megatrain-incomplete"
"""Folder beside the checkpoints in which the next one is written. What a killed run left there is removed."""

TRAINER_STATE = "trainer_state.json"
"""What the Trainer's own checkpoints have, and a folder that a script made for its files hasn't."""

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
    """Removes what an interrupted save, or a deletion that was under way, left in ``run_dir``."""
    shutil.rmtree(run_dir / STAGING_FOLDER, ignore_errors=True)


def publish(run_dir: Path) -> list[Path]:
    """Moves every checkpoint in the staging folder into place, each by one rename, after it is safely on disk.

    A checkpoint of the same name is replaced: at every instant there is the older one or the new one, complete. What a script
    put into its folder before anything was saved there stays.

    Returns:
        The checkpoints' folders.
    """
    staging = run_dir / STAGING_FOLDER
    published = []
    for folder in sorted(staging.iterdir()):
        _keep_files_of_the_script(run_dir / folder.name, folder)
        for path in [*folder.rglob("*"), folder]:
            _flush_to_disk(path)
        target = run_dir / folder.name
        if not (target.exists() and _exchange(folder, target)):
            if target.exists():
                os.rename(target, staging / f"{folder.name}.replaced")
            os.rename(folder, target)
        published.append(target)
    _flush_to_disk(run_dir)
    remove_incomplete(run_dir)
    return published


def _keep_files_of_the_script(target: Path, folder: Path) -> None:
    if not target.is_dir() or (target / TRAINER_STATE).exists():
        return
    for path in target.rglob("*"):
        copy = folder / path.relative_to(target)
        if path.is_file() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders' names in one move; False where the system or the file system can't."""
    try:
        rename: Any = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    at_working_directory, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of <linux/fs.h>
    return rename(at_working_directory, os.fsencode(first), at_working_directory, os.fsencode(second), exchange) == 0


def rotate(run_dir: Path, delete_by_rule: Callable[[Path], None]) -> None:
    """Deletes checkpoints so that a kill leaves each of them whole or gone.

    Args:
        run_dir: the folder of the checkpoints.
        delete_by_rule: called with a folder of empty stand-ins that have the checkpoints' names and times; deletes
            those of the checkpoints that are to go.
    """
    staging = run_dir / STAGING_FOLDER
    stand_ins = staging / "stand-ins"
    stand_ins.mkdir(parents=True)
    checkpoints = [path for path in run_dir.glob("checkpoint-*") if path.is_dir()]
    for path in checkpoints:
        stand_in = stand_ins / path.name
        stand_in.mkdir()
        times = path.stat()
        os.utime(stand_in, ns=(times.st_atime_ns, times.st_mtime_ns))
    delete_by_rule(stand_ins)
    for path in checkpoints:
        if not (stand_ins / path.name).exists():
            os.rename(path, staging / f"{path.name}.deleted")
    remove_incomplete(run_dir)

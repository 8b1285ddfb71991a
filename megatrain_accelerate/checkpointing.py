"""Checkpoints that are complete or absent: written aside, flushed to disk, then renamed into place."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatrain_accelerate.disk import REPLACED, flush_file, flush_folder, staging_folder
from megatrain_accelerate.progress import progress_bar

STAGING_PREFIX = ".megatrain-incomplete"
"""Of the folders beside the checkpoints in which the next one is written. What a killed run left there is removed."""

TRAINER_STATE = "trainer_state.json"
"""What the Trainer's own checkpoints have, and a folder that a script made for its files hasn't."""

_POLL_SECONDS = 0.5

# Weights and adapters, whole or in shards, and the state of a training: what a resume or from_pretrained() would read beside
# the files of the checkpoint in whose folder it is.
_FILES_OF_A_CHECKPOINT = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|adapter_config\.json|trainer_state\.json|training_args\.bin"
    r"|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth"
)

SPACE_REMEDY = (
    "Free some space, set output_dir to another disk, or save less (save_only_model, save_strategy). save_total_limit deletes "
    "an older checkpoint only when the new one is complete."
)


def checkpoint_staging(run_dir: Path, what: str = "checkpoints") -> contextlib.AbstractContextManager[Path]:
    """:func:`.disk.staging_folder` among the checkpoints. Entering it is enough to know that ``run_dir`` can be written to.

    Args:
        run_dir: the folder of the checkpoints.
        what: what is written, for the error's message.
    """
    return staging_folder(run_dir, STAGING_PREFIX, what, SPACE_REMEDY)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # files come and go while they are written
            total += path.stat().st_size
    return total


@contextlib.contextmanager
def saving_progress(folder: Path, expected_bytes: int, show: bool) -> Iterator[None]:
    """Draws a bar of what has been written under ``folder`` while the body runs."""
    bar = progress_bar(expected_bytes, "saving", "B", show=show)
    if bar.disable:
        yield
        return
    done = threading.Event()

    def draw() -> None:
        with bar:
            while not done.wait(_POLL_SECONDS):
                bar.update(min(_folder_bytes(folder), expected_bytes) - bar.n)

    thread = threading.Thread(target=draw, name="megatrain-saving-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def publish(staging: Path) -> list[Path]:
    """Moves every checkpoint in a staging folder into place, each by one rename, after it is safely on disk.

    A checkpoint of the same name is replaced: at every instant there is the older one or the new one, complete. Where the file
    system can't exchange names, a kill may leave neither; the next staging folder then puts the older one back. Files that a
    user or a script put into it stay, as they do where the Trainer writes over it. Its own weights and training state don't:
    beside those of the new checkpoint they would be read instead of them, or with them.

    Args:
        staging: a folder of :func:`checkpoint_staging`.

    Returns:
        The checkpoints' folders.

    Raises:
        OSError: the disk can't take them; the checkpoints before are as they were.
    """
    published = []
    for folder in sorted(staging.iterdir()):
        target = staging.parent / folder.name
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                flush_file(path)
        _keep_files_of_others(target, folder)
        for path in (folder, *folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                flush_folder(path)
        if not (target.exists() and _exchange(folder, target)):
            if target.exists():
                os.rename(target, staging / f"{folder.name}{REPLACED}")
            os.rename(folder, target)
        published.append(target)
    flush_folder(staging.parent)
    return published


def _keep_files_of_others(target: Path, folder: Path) -> None:
    """Gives the new checkpoint the files of the older one that aren't the Trainer's, by further links where possible."""
    was_checkpoint = (target / TRAINER_STATE).exists()
    for where, folders, files in os.walk(target):
        place = folder / Path(where).relative_to(target)
        if not place.is_dir():
            continue
        for name in (*folders, *files):
            path, kept = Path(where, name), place / name
            stale = was_checkpoint and place == folder and _FILES_OF_A_CHECKPOINT.fullmatch(name)
            if stale or os.path.lexists(kept):
                continue
            if path.is_dir() and not path.is_symlink():
                kept.mkdir()
                continue
            try:
                os.link(path, kept, follow_symlinks=False)
            except OSError:  # file systems without hard links
                shutil.copy2(path, kept, follow_symlinks=False)
                if not kept.is_symlink():
                    flush_file(kept)


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
    with checkpoint_staging(run_dir) as staging:
        checkpoints = [path for path in run_dir.glob("checkpoint-*") if path.is_dir()]
        for path in checkpoints:
            stand_in = staging / path.name
            stand_in.mkdir()
            times = path.stat()
            os.utime(stand_in, ns=(times.st_atime_ns, times.st_mtime_ns))
        delete_by_rule(staging)
        for path in checkpoints:
            if not (staging / path.name).exists():
                os.rename(path, staging / f"{path.name}.deleted")

"""Writing files that must be complete or absent: free space, a staging folder, flushing, one-line errors of the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from megatrain_accelerate.errors import DiskError
from megatrain_accelerate.units import MIB, format_bytes

REPLACED = ".replaced"
"""The suffix of a folder that was moved aside for a newer one of the same name."""

_REFUSED_FLUSHES = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_OTHER_FAULTS = (errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EEXIST, errno.ENOTDIR)


def existing_part(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if os.path.exists(place))  # False also if access is denied


def require_free_bytes(folder: Path, parts: dict[str, int], what: str, remedy: str) -> None:
    """Raises ``DiskError``, with the numbers, if the file system of ``folder``, which needn't exist yet, has no room for
    ``parts``, bytes by what they hold. ``what`` and ``remedy`` are the subject and the last sentence of the message. A file
    system that doesn't tell its size isn't checked."""
    needed, usage = sum(parts.values()), shutil.disk_usage(existing_part(folder))
    if usage.total == 0 or needed <= usage.free:
        return
    split = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
    raise DiskError(
        errno.ENOSPC,
        f"{what} takes {format_bytes(needed)} ({split}), and {format_bytes(usage.free)} are free in {folder}. {remedy}",
    )


@contextlib.contextmanager
def _faults_explained(folder: Path, what: str, remedy: str) -> Iterator[None]:
    """Turns what the disk refuses in the body into a one-line ``DiskError``: torch and safetensors hide or bury the cause."""
    try:
        yield
    except DiskError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _writing_fault(folder)
        if number not in (*_NO_ROOM, *_OTHER_FAULTS):
            raise
        file = getattr(error, "filename", None)
        where = file if file and not Path(os.fsdecode(file)).is_relative_to(folder) else folder
        free = format_bytes(shutil.disk_usage(existing_part(folder)).free)
        remedy = remedy if number in _NO_ROOM else "Name a folder that can be written to."
        raise DiskError(number, f"{what} can't be written: {os.strerror(number)}: {where} ({free} free). {remedy}") from error


def _writing_fault(folder: Path) -> int | None:
    """The error number of a small write to the folder, or None if it succeeds."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(MIB))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.errno
    return None


def flush_file(path: Path) -> None:
    """Waits until a file's content is on the disk. Raises ``OSError`` if the disk can't take it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk, if the file system supports that."""
    try:
        flush_file(path)
    except OSError as error:
        if error.errno not in _REFUSED_FLUSHES:
            raise


@contextlib.contextmanager
def staging_folder(parent: Path, prefix: str, what: str, remedy: str) -> Iterator[Path]:
    """Makes a new folder in ``parent``, which is made too if it is missing, and removes it after the body. Folders of this
    ``prefix`` that dead runs left are removed as well, those of live processes only if the file system has no locks on
    folders. What can't be removed (files that are still mapped, on NFS) stays until a later call. Raises ``DiskError`` (see
    :func:`require_free_bytes`) if the disk refuses the folder or a write in the body. Other errors pass through."""
    with _faults_explained(parent, what, remedy):
        parent.mkdir(parents=True, exist_ok=True)
        for left in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
            with _locked(left) as is_mine:
                if is_mine:
                    _discard(left)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with _locked(folder):
        # Another process may have taken the fresh folder for a dead run's before it was locked.
        folder.mkdir(exist_ok=True)
        try:
            with _faults_explained(parent, what, remedy):
                yield folder
        finally:
            _discard(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Locks the folder while the body runs. Yields False if another process has locked it, True also if there are no locks."""
    with contextlib.ExitStack() as stack:
        is_free = True
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        except OSError:
            pass  # NFS locks no folders
        yield is_free


def _discard(staging: Path) -> None:
    """Removes a staging folder as far as possible. A folder that was moved aside moves back if no new one took its place."""
    for replaced in staging.glob(f"*{REPLACED}"):
        target = staging.parent / replaced.name.removesuffix(REPLACED)
        if not target.exists():
            try:
                os.rename(replaced, target)
            except OSError:
                return  # it may be the only copy: a later call tries again
    shutil.rmtree(staging, ignore_errors=True)

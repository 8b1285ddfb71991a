"""Memory that processes share has huge pages where the system lets a process mount, whatever its switch for it says."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatrain_accelerate.parallel import shared_file
from megatrain_accelerate.parallel.shared_file import open_huge_file

SIZE = 16 * 2**20


def huge_bytes() -> int:
    """Of this process's shared memory, what lies in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped:"))


def test_shared_memory_has_huge_pages_that_others_map_too_and_leaves_no_mount() -> None:
    mounts, before = Path("/proc/self/mounts").read_text(), huge_bytes()
    mount = ["unshare", "-m" if os.geteuid() == 0 else "-Urm", "mount", "-t", "tmpfs", "none", "/tmp"]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this system lets nobody mount")
    file = open_huge_file()
    assert file is not None
    assert not os.get_inheritable(file)
    os.ftruncate(file, 1 << 40)
    memory = mmap.mmap(file, SIZE, flags=mmap.MAP_SHARED, offset=2**30)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes([7]) * SIZE
    others = subprocess.run(
        ["od", "-An", "-tu1", "-j", str(2**30), "-N1", f"/proc/{os.getpid()}/fd/{file}"], capture_output=True
    )
    assert others.stdout.split() == [b"7"]
    assert huge_bytes() - before == SIZE
    assert Path("/proc/self/mounts").read_text() == mounts
    memory.close()
    os.close(file)


def test_there_is_no_huge_file_where_nobody_may_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(shared_file, "_HELPER", "raise PermissionError")
    assert open_huge_file() is None
    assert len(os.listdir("/proc/self/fd")) == open_before

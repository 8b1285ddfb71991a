"""A file of huge pages for memory that processes share, whatever the system's switch for such memory says.

Most systems leave ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` at ``never``. Then memory that is shared has pages of
4 KiB: they are made at a tenth of the speed, and the host's AdamW is slower on them. A tmpfs may have a setting of its own,
and whoever has a mount namespace may mount one. So a helper process does both, hands over an open file, and ends; the mount
goes with it, while the file stays as long as it is open or mapped.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile

_SECONDS = 10.0
"""For the helper, which takes 20 ms."""

_HELPER = r"""
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
CLONE_NEWNS, CLONE_NEWUSER, MS_REC_PRIVATE = 0x20000, 0x10000000, 0x44000
user, group = os.geteuid(), os.getegid()
call("unshare", CLONE_NEWNS | (CLONE_NEWUSER if user else 0))
if user:  # a file needs an owner there
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as entry:
            entry.write(text)
call("mount", b"none", b"/", None, MS_REC_PRIVATE, None)
call("mount", b"megatrain", os.fsencode(sys.argv[2]), b"tmpfs", 0, b"huge=advise,size=0")
file = os.open(sys.argv[2], os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"file"], [file])
"""


def open_huge_file() -> int | None:
    """The descriptor of an empty file without a name, whose mappings get huge pages where they are advised to (MADV_HUGEPAGE).

    None where the system lets nobody mount, as in most containers.
    """
    ours, helpers = socket.socketpair()
    with ours, helpers:
        ours.settimeout(_SECONDS)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _HELPER, str(helpers.fileno()), tempfile.gettempdir()],
                pass_fds=[helpers.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=True,
            )
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
            return descriptors[0] if descriptors else None
    return None

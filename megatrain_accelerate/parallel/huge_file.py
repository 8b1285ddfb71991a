"""A file of huge pages for memory that processes share, whatever the system's ``shmem_enabled`` says.

Most systems leave ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` at ``never``. Then shared memory has pages of 4 KiB:
making them takes ten times as long, and the host's AdamW is slower on them. A tmpfs may have a setting of its own. So a helper
process mounts one, in a mount namespace, hands over an open file, and ends. The mount goes with it; the file stays as long as
it is open or mapped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile

_SECONDS = 10.0
"""The helper's limit; it takes 20 ms."""

_HELPER = r"""
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
CLONE_NEWNS, CLONE_NEWUSER, MS_REC_PRIVATE = 0x20000, 0x10000000, 0x44000
user, group = os.geteuid(), os.getegid()
call("unshare", CLONE_NEWNS | (CLONE_NEWUSER if user else 0))
if user:  # who isn't mapped can't own a file
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as entry:
            entry.write(text)
call("mount", b"none", b"/", None, MS_REC_PRIVATE, None)
call("mount", b"megatrain", os.fsencode(sys.argv[2]), b"tmpfs", 0, b"huge=advise,size=0")
file = os.open(sys.argv[2], os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"file"], [file])
"""


def open_huge_file() -> int | None:
    """The descriptor of an empty file without a name or a limit, whose mappings get huge pages under MADV_HUGEPAGE; None where
    mounting fails, as in most containers."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_SECONDS)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [sys.executable or "python3", "-I", "-S", "-c", _HELPER, str(theirs.fileno()), tempfile.gettempdir()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_SECONDS,
                check=True,
            )
            _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
            os.set_inheritable(descriptor, False)
            return descriptor
    return None

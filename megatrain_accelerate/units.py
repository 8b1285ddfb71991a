"""Units of memory. GiB is 2**30 bytes; GB is 1e9 bytes, and is used for link traffic only."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GB = 1_000_000_000


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def format_bytes(count: int) -> str:
    """A byte count for people, in the unit that leaves one to four digits before the point."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"

"""Whether ranks exchange and fetch the same things: two layers of one shape could be mixed up, and nobody would see it."""

from __future__ import annotations

import ctypes
import zlib

from megatrain_accelerate.errors import RankError
from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.parallel.shared_file import SharedFile

_LENGTH = 1024
"""How far one rank may be ahead of another and still be compared. Ranks meet in every step, so that none is further ahead."""


class OrderCheck:
    """A list of each rank's last collectives of one kind (``what`` they exchange), in memory that all map. Each rank compares
    its own with those of ranks ahead of it."""

    def __init__(self, file: SharedFile, ranks: Ranks, what: str) -> None:
        self._rank, self._count, self._what = ranks.rank, 0, what
        self._rows = file.rows(ctypes.c_uint64 * _LENGTH)
        self._names: dict[int, str] = {}

    def enter(self, name: str) -> None:
        """Called before each collective. A ``RankError`` where another rank's collective of this number has another name."""
        self._count += 1
        code = zlib.crc32(name.encode())
        self._names.setdefault(code, name)
        self._rows[self._rank][self._count % _LENGTH] = self._count << 32 | code
        for rank, row in enumerate(self._rows):
            number, other = divmod(row[self._count % _LENGTH], 1 << 32)
            if number == self._count and other != code:
                raise RankError(
                    f"rank {self._rank} exchanges {self._what} of {name} where rank {rank} exchanges those of "
                    f"{self._names.get(other, 'another layer')}: the ranks run other layers, or in another order. Layers that "
                    "are left out at random (layerdrop) must be left out on all ranks alike; set their probability to 0"
                )

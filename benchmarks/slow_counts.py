"""What a slow file system was asked for: three numbers in a file that other processes read."""

from __future__ import annotations

import mmap
import struct
import threading
from pathlib import Path
from typing import NamedTuple

_NUMBERS = struct.Struct("=QQQ")


class Asked(NamedTuple):
    """Operations and bytes since the beginning."""

    opens: int
    reads: int
    bytes: int

    @property
    def operations(self) -> int:
        """Opens and reads."""
        return self.opens + self.reads

    def since(self, before: Asked) -> Asked:
        """Return what came after ``before``."""
        return Asked(*(now - then for now, then in zip(self, before, strict=True)))


class Counts:
    """Counts in a file, made if need be; one process writes, its threads may share the object."""

    def __init__(self, path: Path) -> None:
        path.touch()
        with path.open("r+b") as file:
            file.truncate(_NUMBERS.size)
            self._map = mmap.mmap(file.fileno(), _NUMBERS.size)
        self._mutex = threading.Lock()

    def add(self, opens: int = 0, reads: int = 0, bytes_: int = 0) -> None:
        """Count some more."""
        with self._mutex:
            now = self.asked()
            _NUMBERS.pack_into(
                self._map, 0, now.opens + opens, now.reads + reads, now.bytes + bytes_
            )

    def asked(self) -> Asked:
        """Return what has been counted."""
        return Asked(*_NUMBERS.unpack_from(self._map))

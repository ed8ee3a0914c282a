"""What programs under the shim tell: opens, reads and bytes by source and tier, and requests."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from stoker._core import acquire_fence
from stoker.tiering.layout import (
    COUNTERS,
    COUNTERS_MAGIC,
    REQUEST,
    REQUEST_MAGIC,
    RING,
    RING_BYTES,
    offset_of,
)

EVENTS = (
    "requests",
    "requests_lost",
    "waits",
    "waits_given_up",
    "checks",
    "changes",
    "elsewhere",
)
_STAMP = 8  # bytes
_PATIENCE = 1.0  # seconds for a program to finish a record; one that was killed does not


def create_counters(path: Path) -> None:
    """Make the file that programs count in, and the ring behind it, where they leave requests.

    It must not exist. Raises :class:`OSError`.
    """
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.posix_fallocate(file.fileno(), 0, COUNTERS.itemsize + RING.itemsize)
        file.write(COUNTERS_MAGIC)


class Ring:
    """The requests that programs leave behind the counters; for one thread of the daemon.

    ``shim/table.h`` says what lies where. Nothing in it is trusted.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        ring = memoryview(self._map)[COUNTERS.itemsize :]
        begin = offset_of(RING, "words")
        self._bytes, self._words = ring[begin:], ring[begin:].cast("Q")
        self._numbers = ring[:begin].cast("Q")
        self._head, self._tail = offset_of(RING, "head") // 8, offset_of(RING, "tail") // 8
        self._stalled_since: float | None = None

    def is_empty(self) -> bool:
        """Whether all that programs left was taken."""
        return self._numbers[self._head] == self._numbers[self._tail]

    def take(self, most: int) -> list[bytes]:
        """Return up to ``most`` requests with their paths, in the order in which they came."""
        head, tail = self._numbers[self._head], self._numbers[self._tail]
        found: list[bytes] = []
        while tail != head and len(found) < most:
            if self._words[tail % RING_BYTES // 8] != tail + 1:
                tail = self._wait(tail, head)
                break
            acquire_fence()  # the record is there before its stamp
            self._stalled_since = None
            message = self._record(tail + _STAMP, head)
            if message is None:  # where the next one begins cannot be known
                tail = head
                break
            found.append(message)
            tail += -(-(_STAMP + len(message)) // 8) * 8
        self._numbers[self._tail] = tail
        return found

    def _wait(self, tail: int, head: int) -> int:
        """Return where to go on if a record is not finished: there, or behind all after a while."""
        now = time.monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        if now - self._stalled_since < _PATIENCE:
            return tail
        self._stalled_since = None
        return head

    def _record(self, begin: int, head: int) -> bytes | None:
        fixed = self._read(begin, REQUEST.size)
        magic, _, _, length, _, _ = REQUEST.unpack(fixed)
        if magic != REQUEST_MAGIC or begin + REQUEST.size + length > head:
            return None
        return fixed + self._read(begin + REQUEST.size, length)

    def _read(self, begin: int, length: int) -> bytes:
        first = begin % RING_BYTES
        part = bytes(self._bytes[first : first + length])
        return part if len(part) == length else part + bytes(self._bytes[: length - len(part)])


def read_counters(path: Path, tiers: int) -> dict[str, Any]:
    """Return the sums: ``source`` and ``tiers`` with opens, reads and bytes, and the events.

    Raises :class:`OSError` if the file cannot be read, :class:`ValueError` if it is another.
    """
    content = np.fromfile(path, COUNTERS, 1)
    if not len(content) or content[0]["magic"] != COUNTERS_MAGIC:
        raise ValueError(f"{path} holds no counters")
    shards = content[0]["shards"]
    rows = [
        {name: int(shards["rows"][:, row][name].sum()) for name in ("opens", "reads", "bytes")}
        for row in range(1 + tiers)
    ]
    events = {name: int(shards[name].sum()) for name in EVENTS}
    return {"source": rows[0], "tiers": rows[1:], **events}

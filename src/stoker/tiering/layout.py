"""Memory shared with the preload library: its records, its counters, and waking waiters."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from stoker._core import acquire_fence

TABLE_MAGIC, COUNTERS_MAGIC, VERSION = b"STOKERT1", b"STOKERC2", 2
REQUEST_MAGIC = 0x4D544B53
MAX_SOURCES, MAX_TIERS, BUCKETS, SHARDS, MARKS = 8, 8, 64, 64, 65536
RING_BYTES = 4194304
PATH_MULTIPLIER, COPY_MULTIPLIER = 0x9E3779B1, 0x9E3779B97F4A7C15
STRING = np.dtype([("offset", "u8"), ("length", "u4"), ("zero", "u4")])
SOURCE = np.dtype(
    [("path", STRING), ("dev", "u8"), ("ino", "u8"), ("number", "u4"), ("zero", "u4")]
)
TIER = np.dtype([("part_dir", STRING), ("dev", "u8")])
ENTRY = np.dtype(
    [
        ("word", "u4"),
        ("tier", "u1"),
        ("source", "u1"),
        ("link", "u2"),
        ("hash", "u4"),
        ("path_length", "u4"),
        ("path_offset", "u8"),
        ("copied", "u8"),
        ("validated_ns", "u8"),
        ("copy_ino", "u8"),
        ("source_dev", "u8"),
        ("source_ino", "u8"),
        ("source_mode", "u4"),
        ("source_nlink", "u4"),
        ("source_uid", "u4"),
        ("source_gid", "u4"),
        ("source_size", "u8"),
        ("source_blocks", "u8"),
        ("source_atime_ns", "i8"),
        ("source_mtime_ns", "i8"),
        ("source_ctime_ns", "i8"),
        ("source_blksize", "u4"),
        ("zero", "u4"),
    ]
)
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "u4"),
        ("zero", "u4"),
        ("bytes", "u8"),
        ("entries_offset", "u8"),
        ("entries_limit", "u8"),
        ("path_index_offset", "u8"),
        ("copy_index_offset", "u8"),
        ("arena_offset", "u8"),
        ("arena_limit", "u8"),
        ("index_limit_log2", "u4"),
        ("zero1", "u4"),
        ("small_bytes", "u8"),
        ("ahead_bytes", "u8"),
        ("wait_ms", "u4"),
        ("heartbeat_ms", "u4"),
        ("source_count", "u4"),
        ("tier_count", "u4"),
        ("sources", SOURCE, MAX_SOURCES),
        ("tiers", TIER, MAX_TIERS),
        ("copy_dirs", STRING, (MAX_SOURCES, MAX_TIERS)),
        ("large_bytes", "u8"),
        ("mount_namespace", "u8"),
        ("pad1", "V128"),
        ("heartbeat_ns", "u8"),
        ("arena_used", "u8"),
        ("entry_count", "u4"),
        ("path_index_log2", "u4"),
        ("copy_index_log2", "u4"),
        ("daemon_pid", "u4"),
        ("pad2", "V32"),
        ("changes", "u4", BUCKETS),
        ("pad3", "V1984"),
    ]
)
ROW = np.dtype([("opens", "u8"), ("reads", "u8"), ("bytes", "u8")])
SHARD = np.dtype(
    [
        ("rows", ROW, 1 + MAX_TIERS),
        ("requests", "u8"),
        ("requests_lost", "u8"),
        ("waits", "u8"),
        ("waits_given_up", "u8"),
        ("checks", "u8"),
        ("changes", "u8"),
        ("elsewhere", "u8"),
        ("pad", "V48"),
    ]
)
RING = np.dtype(
    [
        ("head", "u8"),
        ("pad1", "V56"),
        ("tail", "u8"),
        ("pad2", "V56"),
        ("words", "u8", RING_BYTES // 8),
    ]
)
COUNTERS = np.dtype(
    [
        ("magic", "S8"),
        ("marked", "u8"),
        ("all", "u8"),
        ("pad", "V40"),
        ("marks", "u8", MARKS),
        ("shards", SHARD, SHARDS),
    ]
)
REQUEST = struct.Struct("=IBBHII")
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
_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAKE, _ALL = 1, 0x7FFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)


class State(IntEnum):
    """What has become of a file."""

    WANTED = 1
    COPYING = 2
    PLACED = 3
    REFUSED = 4
    DROPPED = 5


class Kind(IntEnum):
    """What a program asks for."""

    OPENED = 1
    CHANGED = 2


def offset_of(dtype: np.dtype[np.void], field: str) -> int:
    """Return where a field of a structure begins."""
    fields = dtype.fields
    assert fields is not None
    return int(fields[field][1])


def allocate(fd: int, begin: int, length: int) -> None:
    """Put zeros where the file has never been written; raises :class:`OSError` without room.

    Memory mapped over a hole would be a SIGBUS where there is no room left. Over bytes that are
    only reserved the first touch takes milliseconds on ext4 with large folios, which programs
    would wait for when they open a file; over bytes that were written it takes microseconds.
    """
    os.posix_fallocate(fd, begin, length)
    while length:
        written = os.pwrite(fd, bytes(min(length, 1 << 20)), begin)
        begin, length = begin + written, length - written


def create_counters(path: Path) -> None:
    """Make the file with the programs' counters, followed by the ring for their requests.

    It must not exist. Raises :class:`OSError`.
    """
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        allocate(file.fileno(), 0, COUNTERS.itemsize + RING.itemsize)
        file.write(COUNTERS_MAGIC)


class Ring:
    """The requests that programs leave behind the counters; for one thread of the daemon.

    ``shim/table.h`` describes the layout. Nothing in it is trusted.
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
        """Return where to continue after an unfinished record: there, or in the end at ``head``."""
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


def wake(memory: mmap.mmap, offset: int) -> None:
    """Wake every process that waits for the 32-bit word at ``offset`` of a shared mapping.

    On processors other than x86-64 and ARM it does nothing: waiters also poll.
    """
    if _NUMBER is not None:
        word = ctypes.c_uint32.from_buffer(memory, offset)
        _libc.syscall(
            ctypes.c_long(_NUMBER),
            ctypes.byref(word),
            ctypes.c_long(_WAKE),
            ctypes.c_long(_ALL),
            None,
            None,
            ctypes.c_long(0),
        )

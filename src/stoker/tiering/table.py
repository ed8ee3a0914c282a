"""The table of placed files: written by the daemon alone, read by every program under the shim.

``shim/table.h`` describes the layout and what readers rely on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._core import release_fence
from stoker.errors import CapacityError
from stoker.node.locks import try_lock
from stoker.tiering.layout import (
    BUCKETS,
    COPY_MULTIPLIER,
    ENTRY,
    HEADER,
    PATH_MULTIPLIER,
    TABLE_MAGIC,
    VERSION,
    State,
    allocate,
    offset_of,
    wake,
)
from stoker.types import FileIdentity

_ENTRIES_LOG2 = 24  # 16 million files; only what is used takes memory
_ARENA_LIMIT = 1 << 32
_GROWTH = 1 << 16  # bytes by which entries and arena are allocated
_FIRST_INDEX_LOG2 = 10
_IDENTITY = ("dev", "ino", "size", "mtime_ns", "ctime_ns")  # as FileIdentity has them
_FROM_STATUS = {
    name: name.replace("source_", "st_") for name in ENTRY.names or () if name[:7] == "source_"
}
_AT = {name: offset_of(ENTRY, name) for name in ENTRY.names or ()}
_HEADER_AT = {name: offset_of(HEADER, name) for name in HEADER.names or ()}


@dataclass(frozen=True)
class Settings:
    """Settings that programs need, apart from the files."""

    small_bytes: int
    large_bytes: int
    ahead_bytes: int
    wait_ms: int
    heartbeat_ms: int


@dataclass(frozen=True)
class TierPaths:
    """Where a tier keeps its copies, by absolute path, and the device they lie on."""

    copies: Path
    parts: Path
    dev: int


class Table:
    """The one writer's view; its threads may share it.

    ``path`` must not exist. ``spellings`` are absolute paths by which programs may name the one
    source, the directory with the status ``root``: copies are served while they lead there. The
    file is locked as long as this process lives, by which programs know that it does.
    Raises :class:`OSError` if the file cannot be made, and, when it is full or the disk is,
    :class:`~stoker.errors.CapacityError` from :meth:`add`; the table stays usable.
    """

    def __init__(
        self,
        path: Path,
        spellings: list[Path],
        root: os.stat_result,
        tiers: list[TierPaths],
        settings: Settings,
    ) -> None:
        slots = 1 << _ENTRIES_LOG2
        index_bytes = 8 * (slots * 2)
        entries = HEADER.itemsize
        path_index = entries + slots * ENTRY.itemsize
        copy_index = path_index + index_bytes
        arena = copy_index + index_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try_lock(self._file)
        os.ftruncate(self._file, arena + _ARENA_LIMIT)
        allocate(self._file, 0, entries)
        self._map = mmap.mmap(self._file, 0)
        self._words = memoryview(self._map).cast("I")
        self._longs = memoryview(self._map).cast("Q")
        self._header = np.frombuffer(self._map, HEADER, 1)[0]
        self._mutex = threading.Lock()
        self._allocated = {entries: 0, arena: 0}
        self._entries, self._arena = entries, arena
        self._indexes = {"path": path_index, "copy": copy_index}
        self._devices = [tier.dev for tier in tiers]
        self._copies = 0  # slots of the copy index in use
        self._describe(spellings, root, tiers, settings)

    def _describe(
        self,
        spellings: list[Path],
        root: os.stat_result,
        tiers: list[TierPaths],
        settings: Settings,
    ) -> None:
        header = self._header
        header["version"], header["bytes"] = VERSION, len(self._map)
        header["entries_offset"], header["entries_limit"] = self._entries, 1 << _ENTRIES_LOG2
        header["arena_offset"], header["arena_limit"] = self._arena, _ARENA_LIMIT
        header["index_limit_log2"] = _ENTRIES_LOG2 + 1
        for name, offset in self._indexes.items():
            header[f"{name}_index_offset"] = offset
            self._allocate_index(name, _FIRST_INDEX_LOG2)
            header[f"{name}_index_log2"] = _FIRST_INDEX_LOG2
        for name, value in vars(settings).items():
            header[name] = value
        header["source_count"], header["tier_count"] = len(spellings), len(tiers)
        for row, spelling in zip(header["sources"], spellings, strict=False):
            row["path"]["offset"], row["path"]["length"] = self._store(os.fsencode(spelling))
            row["dev"], row["ino"] = root.st_dev, root.st_ino
        for number, tier in enumerate(tiers):
            row = header["tiers"][number]
            row["part_dir"]["offset"], row["part_dir"]["length"] = self._store(
                os.fsencode(tier.parts)
            )
            row["dev"] = tier.dev
            copies = header["copy_dirs"][0][number]
            copies["offset"], copies["length"] = self._store(os.fsencode(tier.copies))
        with contextlib.suppress(OSError):
            header["mount_namespace"] = Path("/proc/self/ns/mnt").stat().st_ino
        header["daemon_pid"] = os.getpid()
        self.beat()
        release_fence()
        header["magic"] = TABLE_MAGIC

    def beat(self) -> None:
        """Say that the daemon is alive."""
        self._longs[_HEADER_AT["heartbeat_ns"] // 8] = time.monotonic_ns()

    def close(self) -> None:
        """Tell programs that the daemon has ended; they read the source from now on."""
        self._longs[_HEADER_AT["heartbeat_ns"] // 8] = 0

    @property
    def memory(self) -> int:
        """Bytes of memory or disk that the table takes, paths included."""
        return os.fstat(self._file).st_blocks * 512

    # --- entries ---

    def __len__(self) -> int:
        return self._words[_HEADER_AT["entry_count"] // 4]

    def has(self, number: int, code: int) -> bool:
        """Whether there is an entry of that number, of a path with that hash."""
        at = (self._entry_at(number) + _AT["hash"]) // 4
        return number < len(self) and self._words[at] == code

    def find(self, path: bytes) -> int | None:
        """Return the newest entry of a file, ``path`` relative to the source; None without one."""
        with self._mutex:
            slot = self._path_slot(path, zlib.crc32(path, 0))
            found = self._words[slot]
        return found - 1 if found else None

    def entry(self, number: int) -> dict[str, Any]:
        """Return the values of an entry by name, with its ``path``, ``state`` and ``identity``."""
        row = np.frombuffer(self._map, ENTRY, 1, self._entries + number * ENTRY.itemsize)[0]
        values: dict[str, Any] = {name: row[name].item() for name in ENTRY.names or ()}
        identity = FileIdentity(*(values[f"source_{name}"] for name in _IDENTITY))
        state = State(values["word"] & 0xFF)
        return values | {"path": self.path(number), "state": state, "identity": identity}

    def path(self, number: int) -> bytes:
        """Return the path of an entry, relative to the source."""
        at = self._entry_at(number)
        begin = self._arena + self._longs[(at + _AT["path_offset"]) // 8]
        return self._map[begin : begin + self._words[(at + _AT["path_length"]) // 4]]

    def state(self, number: int) -> State:
        """Return the state of an entry."""
        return State(self._words[self._entry_at(number) // 4] & 0xFF)

    def add(
        self,
        path: bytes,
        status: os.stat_result,
        state: State,
        *,
        is_link: bool,
        seen_ns: int,
        tier: int = 0,
        copy_ino: int = 0,
    ) -> int:
        """Add an entry, in place of an older one of that path; return its number.

        ``status`` is the source file's own, looked at no earlier than ``seen_ns``.
        """
        values = {source: getattr(status, name) for source, name in _FROM_STATUS.items()}
        values |= {"word": int(state), "tier": tier, "link": is_link, "copy_ino": copy_ino}
        values |= {"hash": zlib.crc32(path, 0), "path_length": len(path), "validated_ns": seen_ns}
        if state is State.PLACED:
            values["copied"] = status.st_size
        with self._mutex:
            number = self._append(values, path)
            if copy_ino:
                self._index_copy(number, copy_ino)
        self._changed(number, wakes=state is not State.WANTED)
        return number

    def placed_on(self, tier: int) -> list[int]:
        """Return the entries whose copies lie on a tier."""
        entries, placed = self._placed()
        numbers: list[int] = placed[entries["tier"][placed] == tier].tolist()
        return numbers

    def placed_before(self, seen_ns: int, most: int) -> list[int]:
        """Return placed entries whose source was not seen since, the longest unseen first."""
        entries, placed = self._placed()
        seen = entries["validated_ns"][placed]
        due = np.flatnonzero(seen < seen_ns)
        numbers: list[int] = placed[due[np.argsort(seen[due], kind="stable")[:most]]].tolist()
        return numbers

    def _placed(self) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        entries = np.frombuffer(self._map, ENTRY, len(self), self._entries)
        return entries, np.flatnonzero((entries["word"] & 0xFF) == State.PLACED)

    def set_state(self, number: int, state: State) -> None:
        """Move an entry on, and wake who waits for it."""
        self._set_state(number, state)
        self._changed(number)

    def start_copy(self, number: int, tier: int, copy_ino: int) -> None:
        """Note where a wanted entry's copy comes to lie, and that it grows from nothing."""
        at = self._entry_at(number)
        with self._mutex:
            self._map[at + _AT["tier"]] = tier
            self._longs[(at + _AT["copied"]) // 8] = 0
            self._longs[(at + _AT["copy_ino"]) // 8] = copy_ino
            self._index_copy(number, copy_ino)
        self._set_state(number, State.COPYING)
        self._changed(number, wakes=False)

    def set_copied(self, number: int, done: int) -> None:
        """Note that ``done`` bytes can be read from the copy."""
        release_fence()
        self._longs[(self._entry_at(number) + _AT["copied"]) // 8] = done
        self._changed(number)

    def raise_validated(self, number: int, seen_ns: int) -> None:
        """Note that a source was seen unchanged."""
        at = (self._entry_at(number) + _AT["validated_ns"]) // 8
        with self._mutex:
            if seen_ns > self._longs[at]:
                self._longs[at] = seen_ns

    # --- inside; the mutex is held where something is changed ---

    def _publish(self, word: int, value: int) -> None:
        """Store a word; a program that sees it sees all that was stored before, on ARM too."""
        release_fence()
        self._words[word] = value

    def _set_state(self, number: int, state: State) -> None:
        with self._mutex:
            at = self._entry_at(number) // 4
            word = self._words[at]
            self._publish(at, int(state) + 256 * (((word >> 8) + 1) & 0xFFFFFF))

    def _entry_at(self, number: int) -> int:
        return self._entries + number * ENTRY.itemsize

    def _changed(self, number: int, wakes: bool = True) -> None:
        """Count a change; those that wait look each millisecond, and wake at once if need be."""
        bucket = self._words[(self._entry_at(number) + _AT["hash"]) // 4] % BUCKETS
        at = _HEADER_AT["changes"] + 4 * bucket
        with self._mutex:
            self._publish(at // 4, (self._words[at // 4] + 1) & 0xFFFFFFFF)
        if wakes:
            wake(self._map, at)

    def _append(self, values: dict[str, int], path: bytes) -> int:
        number = len(self)
        if number >= 1 << _ENTRIES_LOG2:
            raise CapacityError(f"the table is full: {number} files")
        at = self._entry_at(number)
        self._allocate(self._entries, at + ENTRY.itemsize - self._entries)
        if 4 * (number + 1) > 3 << int(self._header["path_index_log2"]):
            self._grow("path")
        slot = self._path_slot(path, values["hash"])
        older = self._words[slot]
        if older:  # its path lies there already
            same = self._entry_at(older - 1) + _AT["path_offset"]
            values["path_offset"] = self._longs[same // 8]
        else:
            values["path_offset"], _ = self._store(path)
        row = np.array(tuple(values.get(name, 0) for name in ENTRY.names or ()), ENTRY)
        self._map[at : at + ENTRY.itemsize] = row.tobytes()
        self._publish(_HEADER_AT["entry_count"] // 4, number + 1)
        self._publish(slot, number + 1)
        return number

    def _store(self, text: bytes) -> tuple[int, int]:
        """Put a string into the arena; return its offset there and its length."""
        used = self._longs[_HEADER_AT["arena_used"] // 8]
        if used + len(text) + 1 > _ARENA_LIMIT:
            raise CapacityError(f"the table is full: {used} bytes of paths")
        self._allocate(self._arena, used + len(text) + 1)
        self._map[self._arena + used : self._arena + used + len(text)] = text
        self._longs[_HEADER_AT["arena_used"] // 8] = used + len(text) + 1
        return used, len(text)

    def _allocate(self, begin: int, length: int) -> None:
        """Have the first ``length`` bytes from ``begin`` on in memory: a hole could be a SIGBUS."""
        has = self._allocated[begin]
        if length <= has:
            return
        wanted = -(-length // _GROWTH) * _GROWTH
        self._make_room(begin + has, wanted - has)
        self._allocated[begin] = wanted

    def _allocate_index(self, name: str, log2: int) -> None:
        self._make_room(self._indexes[name] + (4 << log2), 4 << log2)

    def _make_room(self, begin: int, length: int) -> None:
        try:
            allocate(self._file, begin, length)
        except OSError as error:
            raise CapacityError(f"no room for the table of placed files: {error}") from error

    # --- indexes: open addressing, in words of the whole file ---

    def _path_slot(self, path: bytes, code: int) -> int:
        """Return the slot with the newest entry of that path, or where it belongs."""
        log2 = int(self._header["path_index_log2"])
        for slot in self._probe("path", _path_home(code, log2), log2):
            number = self._words[slot] - 1
            at = self._entry_at(number)
            if number < 0 or (
                self._words[(at + _AT["hash"]) // 4] == code and self.path(number) == path
            ):
                return slot
        raise AssertionError("an index has empty slots")

    def _index_copy(self, number: int, copy_ino: int) -> None:
        """Let the copy's inode lead to the entry, no more to that of a file that had it before."""
        if 4 * (self._copies + 1) > 3 << int(self._header["copy_index_log2"]):
            self._grow("copy")
        dev = self._device(number)
        log2 = int(self._header["copy_index_log2"])
        for slot in self._probe("copy", int(_copy_home(copy_ino, log2)), log2):
            other = self._words[slot] - 1
            if other < 0 or (
                self._longs[(self._entry_at(other) + _AT["copy_ino"]) // 8] == copy_ino
                and self._device(other) == dev
            ):
                self._copies += other < 0
                self._publish(slot, number + 1)
                if other >= 0 and other != number:  # no process has its inode open any more
                    self._longs[(self._entry_at(other) + _AT["copy_ino"]) // 8] = 0
                return

    def _device(self, number: int) -> int:
        return self._devices[self._map[self._entry_at(number) + _AT["tier"]]]

    def _probe(self, name: str, home: int, log2: int) -> Iterator[int]:
        """Yield the slots of an index from ``home`` on, as positions in the file's words."""
        begin = self._indexes[name] // 4 + (1 << log2)
        for step in range(1 << log2):
            yield begin + ((home + step) & ((1 << log2) - 1))

    def _grow(self, name: str) -> None:
        """Fill an index of twice the size beside the present one, and let it take over."""
        log2 = int(self._header[f"{name}_index_log2"]) + 1
        self._allocate_index(name, log2)
        begin = self._indexes[name]
        old = np.frombuffer(self._map, np.uint32, 1 << (log2 - 1), begin + (2 << log2))
        new = np.frombuffer(self._map, np.uint32, 1 << log2, begin + (4 << log2))
        numbers = np.unique(old[old > 0]) - 1
        entries = np.frombuffer(self._map, ENTRY, len(self), self._entries)
        if name == "copy":
            numbers = numbers[entries["copy_ino"][numbers] != 0]
        homes = (
            _path_home(entries["hash"][numbers].astype(np.uint64), log2)
            if name == "path"
            else _copy_home(entries["copy_ino"][numbers], log2)
        )
        _fill(new, numbers, homes.astype(np.int64))
        if name == "copy":
            self._copies = len(numbers)
        self._publish(_HEADER_AT[f"{name}_index_log2"] // 4, log2)


def _path_home(code: Any, log2: int) -> Any:
    """Return the first slot of a hash, an int or an array."""
    return ((code * PATH_MULTIPLIER) & 0xFFFFFFFF) >> (32 - log2)


def _copy_home(ino: Any, log2: int) -> Any:
    """Return the first slot of an inode, an int or an array (which multiplies modulo 2^64)."""
    if isinstance(ino, np.ndarray):
        return (ino * np.uint64(COPY_MULTIPLIER)) >> np.uint64(64 - log2)
    return ((ino * COPY_MULTIPLIER) & 0xFFFFFFFFFFFFFFFF) >> (64 - log2)


def _fill(index: NDArray[np.uint32], numbers: NDArray[np.uint32], homes: NDArray[np.int64]) -> None:
    """Put entries into an empty index, each as near behind its first slot as there is room."""
    first = np.argsort(homes, kind="stable")
    numbers, homes = numbers[first], homes[first]
    rank = np.arange(len(homes))
    slots = np.maximum.accumulate(homes - rank) + rank
    inside = slots < len(index)
    index[slots[inside]] = numbers[inside] + 1
    free = iter(np.flatnonzero(index[: len(homes) + 1] == 0))  # beyond the end: from the beginning
    for number in numbers[~inside]:
        index[next(free)] = number + 1

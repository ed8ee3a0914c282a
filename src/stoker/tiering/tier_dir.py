"""The tiers of a run: the directory of each, marked as Stoker's, and the room in them."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.errors import CapacityError, ConfigError, SegmentError, StateMismatch, UntrustedPath
from stoker.node import owned
from stoker.node.locks import try_lock
from stoker.node.memory import read_memory
from stoker.tiering.config import SHORTAGES
from stoker.tiering.copier import Origin
from stoker.types import FileIdentity, format_bytes

log = logging.getLogger("stoker.tiering")

MARKER = ".stoker-tier"
"""File that marks the directory as Stoker's; nothing is ever removed from one without it."""

FIRST_REST = 5.0
"""Seconds of a tier's first pause; doubles with each failure in a row."""

_META, _COPIES, _PARTS, _ORIGINS = "meta.json", "copies", "parts", "origins.db"
_PART = re.compile(r"[0-9]+")
# Device and inode numbers may need all 64 bits, and SQLite's integers are signed.
_IDENTITY, _INODE = struct.Struct("<QQqqq"), struct.Struct("<Q")
_LONGEST_REST = 600.0
_IN_MEMORY = {"tmpfs", "ramfs"}


class TierDir:
    """A directory that holds whole copies of a source's files; one process has it at a time.

    The copy of ``a/b.jpg`` is ``copies/a/b.jpg``, with the file's size and modification time.
    ``origins`` says what it was made from, by which the next run knows whether it is still good.
    Unfinished copies lie in ``parts``.
    Construction makes and marks the directory and removes unfinished copies; it raises
    :class:`~stoker.errors.ConfigError` where the directory cannot be used,
    :class:`~stoker.errors.UntrustedPath` where other users may have put something there,
    :class:`~stoker.errors.StateMismatch` if it is another source's, and
    :class:`~stoker.errors.SegmentError` while another process has it. Threads may share it.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        """What it is called, also by programs that open copies; nothing is written by this."""
        with _errors_named(path):
            self._folder = owned.adopt(path, MARKER, "tier")
        self._inside = self._folder.inside
        self.copies = self._inside / _COPIES
        self.parts = self._inside / _PARTS
        try:
            with _errors_named(path):
                self._marker = _open_marker(self._folder)
        except BaseException:
            self._folder.close()
            raise
        try:
            if not try_lock(self._marker):
                raise SegmentError(f"{path} is in use by another run: use another directory")
            with _errors_named(path):
                self._claim(source)
                for folder in (self.copies, self.parts):
                    folder.mkdir(mode=0o700, exist_ok=True)
                    owned.check(folder.lstat(), path / folder.name)
                _clear_parts(self.parts)
                self.used = sum(size for _, size in _walk(self.copies))
                """Bytes of the copies that were there when it was opened."""
                self.dev = self.parts.stat().st_dev
                self.origins = Origins(self._inside / _ORIGINS)
        except BaseException:
            self._let_go()
            raise

    def close(self) -> None:
        """Let another process have the directory; the copies stay."""
        self.origins.close()
        self._let_go()

    def copy_of(self, relative: bytes) -> str:
        """Return where the copy of a file is or would be; ``relative`` to the source.

        By this process's descriptor of the directory, which no other process can exchange.
        """
        return f"{self.copies}/{os.fsdecode(relative)}"

    def part_of(self, entry: int) -> str:
        """Return where the copy that an entry of the table describes is made."""
        return f"{self.parts}/{entry}"

    @property
    def called(self) -> tuple[Path, Path]:
        """What programs call the directories of the copies and of the unfinished ones."""
        return self.path / _COPIES, self.path / _PARTS

    def is_there(self) -> bool:
        """Whether the directory still is the one that was opened: not removed, not unmounted."""
        try:
            return os.path.samestat((self.path / MARKER).stat(), os.fstat(self._marker))
        except OSError:
            return False

    def _let_go(self) -> None:
        os.close(self._marker)
        self._folder.close()

    def _claim(self, source: Path) -> None:
        """Write down whose copies these are, or refuse those of another source."""
        meta, called = self._inside / _META, self.path / _META
        wanted = {"source": os.fsencode(source).hex(), "named": str(source), "version": 1}
        way_out = f"run `stoker clean {self.path}`, or use another directory"
        try:
            found = json.loads(owned.read_file(meta, called=called))
            holds = found["named"] if found != wanted else None
        except FileNotFoundError:
            if self.copies.exists():
                raise StateMismatch(
                    f"{self.path} holds copies, but nothing says of which source: {way_out}"
                ) from None
            owned.write_file(meta, json.dumps(wanted, ensure_ascii=True).encode())
            return
        except (ValueError, TypeError, KeyError) as error:
            raise StateMismatch(f"{called} is not legible ({error!r}): {way_out}") from error
        if holds is not None:
            raise StateMismatch(f"{self.path} holds copies of {holds}, not of {source}: {way_out}")


class Origins:
    """What each copy of a tier was made from, by the file's path, in a SQLite file.

    It is advisory: if it cannot be written or read, or is damaged, copies are made again. Copies
    noted since the last :meth:`flush` are forgotten when the process is killed.
    Threads may share it.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._fresh: dict[bytes, Origin] = {}
        try:
            self._rows = _open_rows(path)
        except sqlite3.DatabaseError as error:
            log.warning("%s is recreated: %s", path, error)
            for name in _files_of_rows(path):
                name.unlink(missing_ok=True)
            self._rows = _open_rows(path)

    def get(self, path: bytes) -> Origin | None:
        """Return what is known of the copy of a file."""
        with self._lock, _logged():
            if (fresh := self._fresh.get(path)) is not None:
                return fresh
            found = self._rows.execute(
                "SELECT source, copy_inode, crc FROM origins WHERE path = ?", (path,)
            ).fetchone()
            if found is not None:
                (inode,) = _INODE.unpack(found[1])
                return Origin(FileIdentity(*_IDENTITY.unpack(found[0])), inode, found[2])
        return None

    def put(self, path: bytes, origin: Origin) -> None:
        """Note what the copy of a file was made from, in place of what was known."""
        with self._lock:
            self._fresh[path] = origin

    def flush(self) -> None:
        """Write down what was noted; killed afterwards, the process loses nothing."""
        with self._lock, _logged():
            rows = [
                (path, _IDENTITY.pack(*origin.source), _INODE.pack(origin.copy_inode), origin.crc)
                for path, origin in self._fresh.items()
            ]
            if rows:
                with self._rows:
                    self._rows.executemany("REPLACE INTO origins VALUES (?, ?, ?, ?)", rows)
                self._fresh.clear()

    def close(self) -> None:
        """Write down what was noted, and let go of the file."""
        self.flush()
        self._rows.close()


def _open_rows(path: Path) -> sqlite3.Connection:
    for file in _files_of_rows(path):  # a planted journal would be played back
        with contextlib.suppress(FileNotFoundError):
            os.close(owned.open_file(file, os.O_RDWR | (os.O_CREAT if file == path else 0)))
    rows = sqlite3.connect(path, check_same_thread=False)
    try:
        # A power cut may damage it, which costs copies; the tier's lock keeps others out.
        rows.execute("PRAGMA synchronous = OFF")
        rows.execute(
            "CREATE TABLE IF NOT EXISTS origins (path BLOB PRIMARY KEY, source BLOB, "
            "copy_inode BLOB, crc INTEGER) WITHOUT ROWID"
        )
    except BaseException:
        rows.close()
        raise
    return rows


def _files_of_rows(path: Path) -> list[Path]:
    return [path, path.with_name(f"{path.name}-journal")]


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Let a failure of the rows cost copies, no more."""
    try:
        yield
    except (sqlite3.Error, struct.error) as error:
        log.warning("cannot read or write the list of copies: %s", error)


def is_tier(path: Path) -> bool:
    """Whether the directory is marked as a tier of Stoker's."""
    return (path / MARKER).is_file()


def clean(path: Path) -> int:
    """Remove the copies in a tier, and return how many bytes they had; the directory stays.

    Raises :class:`~stoker.errors.ConfigError` for a directory without the marker,
    :class:`~stoker.errors.UntrustedPath` for another user's, and
    :class:`~stoker.errors.SegmentError` while a run uses it. Links are not followed, and stay.
    """
    if not is_tier(path):
        raise ConfigError(f"{path} has no {MARKER}: it is not a tier of Stoker")
    with _errors_named(path), owned.open_folder(path) as folder:
        inside = folder.inside
        marker = _open_marker(folder)
        try:
            if not try_lock(marker):
                raise SegmentError(f"{path} is in use: end the runs that use it first")
            freed = sum(_remove_files(inside / name) for name in (_COPIES, _PARTS))
            for name in (f"{_META}.new", _META, MARKER):
                (inside / name).unlink(missing_ok=True)
            for file in _files_of_rows(inside / _ORIGINS):
                file.unlink(missing_ok=True)
        finally:
            os.close(marker)
    return freed


def _open_marker(folder: owned.Folder) -> int:
    return owned.open_file(folder.inside / MARKER, os.O_RDWR, called=folder.path / MARKER)


def _clear_parts(folder: Path) -> None:
    for part in folder.iterdir():
        if _PART.fullmatch(part.name) and part.is_file() and not part.is_symlink():
            part.unlink()


def _walk(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield path and size of every file below; what is neither file nor folder is not ours."""
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.path, entry.stat(follow_symlinks=False).st_size


def _remove_files(folder: Path) -> int:
    """Remove the files below and the folders that are empty then; return the files' bytes."""
    if not folder.is_dir() or folder.is_symlink():
        return 0
    freed = 0
    for path, size in list(_walk(folder)):
        Path(path).unlink()
        freed += size
    for parent, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # something in it is not ours
            Path(parent).rmdir()
    return freed


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except UntrustedPath:
        raise
    except OSError as error:
        if error.errno in SHORTAGES:  # no fault of the configuration: it may pass
            raise
        raise ConfigError(
            f"tier {str(path)!r} cannot be used ({error.strerror}): "
            "use a directory on a local disk or in memory that you may write"
        ) from error


class Room:
    """Bytes of one tier: ``used`` of at most ``quota``. See :class:`Rooms`, which guards it."""

    def __init__(self, quota: int, used: int) -> None:
        self.quota, self.used = quota, used
        self.rests_until = 0.0
        self.failures = 0


class Rooms:
    """The rooms of all tiers, in the order in which they are tried. Safe in any thread.

    ``quotas`` and ``used`` are bytes, one a tier; ``clock`` gives seconds.
    """

    def __init__(
        self, quotas: list[int], used: list[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rooms = [Room(quota, has) for quota, has in zip(quotas, used, strict=True)]
        self._clock = clock
        self._lock = threading.Lock()

    def reserve(self, size: int) -> int | None:
        """Take ``size`` bytes of the first tier that has them; return its number, None if none."""
        with self._lock:
            now = self._clock()
            for number, room in enumerate(self._rooms):
                if room.rests_until <= now and room.used + size <= room.quota:
                    room.used += size
                    return number
            return None

    def free(self, tier: int, size: int) -> None:
        """Give bytes back."""
        with self._lock:
            self._rooms[tier].used -= size

    def rests(self, tier: int) -> bool:
        """Whether a tier is paused after a failure."""
        with self._lock:
            return self._rooms[tier].rests_until > self._clock()

    def any_rests(self) -> bool:
        """Whether any tier is paused that will be used again."""
        with self._lock:
            now = self._clock()
            return any(now < room.rests_until < math.inf for room in self._rooms)

    def close(self, tier: int) -> None:
        """Never use a tier again."""
        with self._lock:
            self._rooms[tier].rests_until = math.inf

    def is_closed(self, tier: int) -> bool:
        """Whether a tier is never used again."""
        with self._lock:
            return self._rooms[tier].rests_until == math.inf

    def failed(self, tier: int) -> None:
        """Pause a tier after a failure of its own."""
        with self._lock:
            room = self._rooms[tier]
            if room.rests_until <= self._clock():  # copies that fail together count once
                room.rests_until = self._clock() + min(_LONGEST_REST, FIRST_REST * 2**room.failures)
                room.failures += 1

    def worked(self, tier: int) -> None:
        """Forget a tier's failures."""
        with self._lock:
            self._rooms[tier].failures = 0

    def used(self) -> list[int]:
        """Return the bytes used of each tier, including reservations."""
        with self._lock:
            return [room.used for room in self._rooms]


def check_room(tier: TierDir, quota: int) -> None:
    """Raise for a quota that there is no room for.

    Raises :class:`~stoker.errors.CapacityError` if there never can be, and :class:`OSError` if
    other files take the space now.
    """
    found = os.statvfs(tier.path)
    free, where = found.f_bavail * found.f_frsize, "free there"
    if file_system(tier.dev) in _IN_MEMORY and (memory := read_memory().available) < free:
        free, where = memory, "available as memory"
    if quota - tier.used > free:
        message = (
            f"tier {str(tier.path)!r}: {format_bytes(quota)} do not fit, {format_bytes(free)} are "
            f"{where} and {format_bytes(tier.used)} in use by copies: give it a smaller size"
        )
        if quota > found.f_blocks * found.f_frsize:
            raise CapacityError(message)
        raise OSError(errno.ENOSPC, message)


def file_system(dev: int, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system with that device number; empty if it is not known."""
    number = f"{os.major(dev)}:{os.minor(dev)}"
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return ""

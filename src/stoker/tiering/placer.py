"""Decides which files are placed where, and copies them in the background."""

from __future__ import annotations

import contextlib
import errno
import heapq
import io
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import CapacityError
from stoker.tiering.config import Config
from stoker.tiering.copier import TierFault, WorkQueue, copy_file, is_copy
from stoker.tiering.layout import State
from stoker.tiering.table import Table
from stoker.tiering.tier_dir import Rooms, TierDir
from stoker.types import FileIdentity

log = logging.getLogger("stoker.tiering")

LARGE = 8 << 20
"""Bytes above which files are copied apart from the others, and read from a growing copy."""
_MOST_ATTEMPTS = 3
_PAUSE = 2.0  # seconds before a failed copy may be tried again; doubles
_YOUNG = 2.0  # seconds; a later change might not show in the modification time
_MOST_HANDED = 256  # descriptors of programs that are kept until their files are copied
_GLANCE = 0.02  # seconds between two checks whether copying may continue
_LOOKS = 16  # files of an order that are looked at at the same time
# A tier that cannot take one file may well take others.
_OF_ONE_FILE = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EFBIG}


class _Stopped(Exception):
    """The copy is not wanted any more."""


@dataclass(frozen=True)
class _Job:
    """A file that found room: its entry in the table, and where its copy comes to lie."""

    path: bytes
    number: int
    tier: int
    identity: FileIdentity
    handed: io.FileIO | None
    """The program's own descriptor of the source, to be used once."""


@dataclass
class TierCounts:
    """What has happened on one tier."""

    files: int = 0
    """Files that are placed there now."""
    reused: int = 0
    """Copies of an earlier run that were valid."""
    copied: int = 0
    """Files that were copied there."""
    copied_bytes: int = 0
    copy_seconds: float = 0.0
    """Time spent copying, over all threads."""
    failures: int = 0
    """Copies that failed because of the tier."""


@dataclass
class Counts:
    """What has happened altogether."""

    tiers: list[TierCounts]
    refused: int = 0
    """Files that have no copy: they fit nowhere, are empty, or failed."""
    failed: int = 0
    """Copies that failed."""
    dropped: int = 0
    """Copies given up because their source had changed or they were missing."""
    checks: int = 0
    """Checks of sources of placed files."""
    changes: int = 0
    """Those of them that found another file, or none."""
    problems: Counter[str] = field(default_factory=Counter)
    """What failed, and how often."""


class Placer:
    """Places files on tiers; each file once, permanently or until its source changes.

    It uses the first tier with room, reserves bytes before it writes them, and evicts nothing. A
    file whose copy failed is read from the source; later opens try again, a few times. A tier that
    fails is paused, longer each time, and the next ones are used. The source is only read;
    ``source`` is its path in this process.
    Any thread may call any method; none but :meth:`promise` and :meth:`revalidate` waits for
    storage.
    """

    def __init__(
        self, config: Config, source: Path, table: Table, tiers: Sequence[TierDir]
    ) -> None:
        self._config, self._table, self._tiers = config, table, tiers
        self.rooms = Rooms([tier.quota for tier in config.tiers], [tier.used for tier in tiers])
        self.counts = Counts([TierCounts() for _ in tiers])
        self._source = str(source)
        self._mutex = threading.Lock()  # counts, attempts, _later, and steps from state to state
        self._attempts: Counter[bytes] = Counter()
        self._promised: dict[bytes, tuple[int, int]] = {}
        self._later: list[tuple[float, int]] = []
        self._until_tier_rested: list[int] = []
        self._handed: dict[bytes, io.FileIO] = {}
        self._stopping = False
        self._held_until = 0.0
        # Apart, so that small files do not wait for large ones. Where no open waits for them they
        # take what the program leaves of the processors; of large files it reads the copies.
        beside = not config.small
        self._looks = WorkQueue(config.threads, self._look, key=lambda path: path, beside=beside)
        self._large = WorkQueue(config.threads, self._copy, key=lambda job: job.path)

    @property
    def waiting(self) -> int:
        """How many files are yet to be looked at."""
        return len(self._looks)

    def opened(self, path: bytes, handed: io.FileIO | None = None) -> None:
        """Place a file that a program reads; ``path`` is relative to the source.

        ``handed`` is the program's own descriptor of it, which the placer closes.
        """
        if handed is not None:
            with self._mutex:
                if path not in self._handed and len(self._handed) < _MOST_HANDED:
                    self._handed[path] = handed
                else:
                    handed.close()
        self._looks.put(path)

    def hold(self, seconds: float) -> None:
        """Leave processors and disk to the program unless its opens wait."""
        self._held_until = time.monotonic() + seconds

    def changed(self, number: int) -> None:
        """Check the file of an entry whose source is reported changed, or its copy missing."""
        self._looks.put(self._table.path(number))

    def revalidate(self, number: int) -> None:
        """Check whether the source of a placed file has changed; waits for storage."""
        path, seen_ns = self._table.path(number), time.monotonic_ns()
        try:
            status: os.stat_result | None = os.stat(self._at(path))
        except (FileNotFoundError, NotADirectoryError):
            status = None
        except OSError:  # a source that does not answer is no reason to part with copies
            return
        good = status is not None and self._is_good(number, status)
        with self._mutex:
            self.counts.checks += 1
            self.counts.changes += not good
        if good:
            self._table.raise_validated(number, seen_ns)
        else:
            self._looks.put(path)

    def promise(self, paths: Sequence[bytes]) -> int:
        """Reserve room for files in this order, and copy them when there is time.

        Waits until each was checked, several at a time. Returns how many have a place.
        """
        with ThreadPoolExecutor(_LOOKS) as pool:
            statuses = list(pool.map(self._status, paths))
        placed = 0
        for path, status in zip(paths, statuses, strict=True):
            if status is None or not stat.S_ISREG(status.st_mode) or not status.st_size:
                continue
            if not self._has_copy(path, FileIdentity.of(status)):
                tier = self.rooms.reserve(status.st_size)
                if tier is None:
                    continue
                self._promised[path] = tier, status.st_size
            placed += 1
            self._looks.put(path, urgency=1)
        return placed

    def tick(self) -> None:
        """Do what is due; call it a few times per second."""
        now = time.monotonic()
        for folder in self._tiers:
            folder.origins.flush()
        for tier, folder in enumerate(self._tiers):
            if not self.rooms.is_closed(tier) and not folder.is_there():
                self._give_up(tier)
        due = []
        with self._mutex:
            while self._later and self._later[0][0] <= now:
                due.append(heapq.heappop(self._later)[1])
            if self._until_tier_rested and not self.rooms.any_rests():
                due += self._until_tier_rested
                self._until_tier_rested = []
        for number in due:  # the next open of the file asks for it again
            self._drop(number)

    def is_idle(self) -> bool:
        """Whether no file is looked at or copied."""
        return self._looks.is_idle() and self._large.is_idle()

    def close(self) -> None:
        """Stop copying; unfinished copies are removed. The tiers stay open."""
        self._stopping = True
        self._looks.close()
        self._large.close()

    # --- looking ---

    def _at(self, path: bytes) -> str:
        return f"{self._source}/{os.fsdecode(path)}"

    def _status(self, path: bytes) -> os.stat_result | None:
        try:
            return os.stat(self._at(path))
        except OSError:
            return None

    def _look(self, path: bytes) -> None:
        while not (self._config.small or self._stopping) and time.monotonic() < self._held_until:
            time.sleep(_GLANCE)
        seen_ns = time.monotonic_ns()
        with self._mutex:
            handed = self._handed.pop(path, None)
        with handed or contextlib.nullcontext():
            self._settle(path, seen_ns, handed)

    def _settle(self, path: bytes, seen_ns: int, handed: io.FileIO | None) -> None:
        """Bring the table up to date with a file, and place it if it is not."""
        status = self._status(path)
        number = self._table.find(path)
        if number is not None and self._table.state(number) is not State.DROPPED:
            if status is not None and self._is_good(number, status):
                self._table.raise_validated(number, seen_ns)
                return
            self._drop(number)
        if status is not None and stat.S_ISREG(status.st_mode):
            try:
                self._admit(path, status, seen_ns, handed)
            except CapacityError as error:
                self._note(str(error))

    def _is_good(self, number: int, status: os.stat_result) -> bool:
        """Whether an entry describes the current source, and its copy, if any, exists."""
        entry = self._table.entry(number)
        if entry["identity"] != FileIdentity.of(status):
            return False
        if entry["state"] is not State.PLACED:
            return True
        try:
            copy = os.lstat(self._tiers[entry["tier"]].copy_of(entry["path"]))
        except OSError:
            return False
        return bool(copy.st_ino == entry["copy_ino"])

    def _admit(
        self, path: bytes, status: os.stat_result, seen_ns: int, handed: io.FileIO | None
    ) -> None:
        """Give a file an entry, and a place where there is one."""
        identity = FileIdentity.of(status)
        is_link = os.path.islink(self._at(path))

        def add(state: State, tier: int = 0, ino: int = 0) -> int:
            return self._table.add(
                path, status, state, is_link=is_link, seen_ns=seen_ns, tier=tier, copy_ino=ino
            )

        def refuse() -> int:
            with self._mutex:  # counted before a program may end because it waits no longer
                self.counts.refused += 1
            try:
                return add(State.REFUSED)
            except CapacityError:
                with self._mutex:
                    self.counts.refused -= 1
                raise

        if not status.st_size or abs(time.time() - status.st_mtime) < _YOUNG:
            number = refuse()
            if status.st_size:
                self._allow_again(number, _YOUNG)
            return
        if (found := self._find_copy(path, identity)) is not None:
            with self._mutex:  # before, as above
                self.counts.tiers[found[0]].files += 1
                self.counts.tiers[found[0]].reused += 1
            add(State.PLACED, *found)
            return
        tier = self._room_for(path, status.st_size)
        if tier is not None:
            # For the program the path may lead to another file than here.
            if handed is not None and not os.path.samestat(os.fstat(handed.fileno()), status):
                handed = None
            if status.st_size <= LARGE:
                self._copy(_Job(path, add(State.WANTED), tier, identity, handed))
            else:
                kept = None if handed is None else io.FileIO(os.dup(handed.fileno()))
                self._large.put(_Job(path, add(State.WANTED), tier, identity, kept))
            return
        number = refuse()
        if self.rooms.any_rests():
            with self._mutex:
                self._until_tier_rested.append(number)

    def _room_for(self, path: bytes, size: int) -> int | None:
        tier, promised = self._promised.pop(path, (None, 0))
        if tier is not None:
            if promised == size and not self.rooms.rests(tier):
                return tier
            self.rooms.free(tier, promised)
        return self.rooms.reserve(size)

    def _has_copy(self, path: bytes, identity: FileIdentity) -> bool:
        return any(is_copy(t.copy_of(path), identity, t.origins.get(path)) for t in self._tiers)

    def _find_copy(self, path: bytes, identity: FileIdentity) -> tuple[int, int] | None:
        """Return tier and inode of an earlier run's copy; remove it if it is no longer valid."""
        for number, tier in enumerate(self._tiers):
            copy = tier.copy_of(path)
            with contextlib.suppress(OSError):
                status = os.lstat(copy)
                origin = tier.origins.get(path)
                if is_copy(copy, identity, origin, checksum=self._config.checksum):
                    return number, status.st_ino
                if stat.S_ISREG(status.st_mode):
                    os.unlink(copy)
                    self.rooms.free(number, status.st_size)
        return None

    # --- copying ---

    def _copy(self, job: _Job) -> None:
        tier, began = self._tiers[job.tier], time.monotonic()
        part, final = tier.part_of(job.number), tier.copy_of(job.path)
        try:
            if self._stopping or self._table.state(job.number) is not State.WANTED:
                raise _Stopped
            _make_folder(os.path.dirname(final), str(tier.copies))
            origin = copy_file(
                self._at(job.path),
                part,
                final,
                job.identity,
                handed=job.handed,
                fsync=self._config.fsync,
                checksum=self._config.checksum,
                begin=lambda ino: self._table.start_copy(job.number, job.tier, ino),
                progress=lambda done: self._progress(job, done),
            )
        except _Stopped:
            self.rooms.free(job.tier, job.identity.size)
        except OSError as error:
            self._failed(job, error)
        else:
            tier.origins.put(job.path, origin)
            self._finish(job, time.monotonic() - began)

    def _progress(self, job: _Job, done: int) -> None:
        if self._stopping or self._table.state(job.number) is not State.COPYING:
            raise _Stopped
        self._table.set_copied(job.number, done)

    def _finish(self, job: _Job, seconds: float) -> None:
        with self._mutex:
            counts = self.counts.tiers[job.tier]
            counts.copied += 1
            counts.copied_bytes += job.identity.size
            counts.copy_seconds += seconds
            wanted = self._table.state(job.number) is State.COPYING
            if wanted:
                counts.files += 1
                self._attempts.pop(job.path, None)
                self._table.set_state(job.number, State.PLACED)
        self.rooms.worked(job.tier)
        if not wanted:  # dropped at the last moment
            self._remove_copy(self._table.entry(job.number))
            self.rooms.free(job.tier, job.identity.size)

    def _failed(self, job: _Job, error: OSError) -> None:
        self.rooms.free(job.tier, job.identity.size)
        if isinstance(error, TierFault) and error.errno not in _OF_ONE_FILE:
            self.rooms.failed(job.tier)
            with self._mutex:
                self.counts.tiers[job.tier].failures += 1
        self._note(f"{error.strerror or error}")
        log.info("%r could not be copied: %s", job.path, error)
        with self._mutex:
            self.counts.failed += 1
            attempt = self._attempts[job.path] = self._attempts[job.path] + 1
            if self._table.state(job.number) is State.DROPPED:
                return
            self.counts.refused += 1
            self._table.set_state(job.number, State.REFUSED)
        if attempt < _MOST_ATTEMPTS:
            self._allow_again(job.number, _PAUSE * 2 ** (attempt - 1))

    # --- giving up ---

    def _allow_again(self, number: int, after: float) -> None:
        """Let the file of a refused entry be requested again, ``after`` so many seconds."""
        with self._mutex:
            heapq.heappush(self._later, (time.monotonic() + after, number))

    def _drop(self, number: int) -> None:
        """Invalidate an entry, and remove its copy."""
        entry = self._table.entry(number)
        with self._mutex:
            state = self._table.state(number)
            if state is State.DROPPED:
                return
            self._table.set_state(number, State.DROPPED)
            self.counts.refused -= state is State.REFUSED
            if state is not State.PLACED:
                return
            self.counts.dropped += 1
            self.counts.tiers[entry["tier"]].files -= 1
        self.rooms.free(entry["tier"], entry["source_size"])
        self._remove_copy(entry)

    def _remove_copy(self, entry: dict[str, Any]) -> None:
        """Remove the copy that an entry describes, not one that has taken its place."""
        copy = self._tiers[entry["tier"]].copy_of(entry["path"])
        with contextlib.suppress(OSError):
            if os.lstat(copy).st_ino == entry["copy_ino"]:
                os.unlink(copy)

    def _give_up(self, tier: int) -> None:
        """Stop using a tier that has vanished."""
        self.rooms.close(tier)
        self._note(f"{self._tiers[tier].path} has vanished")
        for number in self._table.placed_on(tier):
            self._drop(number)

    def _note(self, problem: str) -> None:
        with self._mutex:
            self.counts.problems[problem] += 1


def _make_folder(folder: str, root: str) -> None:
    """Make a folder below ``root``, which must exist: a vanished root is not recreated."""
    try:
        if folder != root and not os.path.isdir(folder):
            _make_folder(os.path.dirname(folder), root)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
    except OSError as error:
        raise TierFault(error.errno, error.strerror, error.filename) from error

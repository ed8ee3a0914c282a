"""A cache on local disk: its directory, which one job uses at a time, and the file in it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

from stoker._core import ABI
from stoker._core import file_bytes as core_file_bytes
from stoker.errors import CapacityError, ConfigError, SegmentError, StateMismatch, UntrustedPath
from stoker.node import owned
from stoker.node.locks import await_lock, try_lock
from stoker.policy.base import Region
from stoker.store.arena import Arena, check_sizes, payload_within
from stoker.store.registry import SharedArena, open_arena
from stoker.types import format_bytes, parse_bytes

MARKER = ".stoker-cache"
"""File that marks the directory as Stoker's; nothing is ever removed from one without it."""

log = logging.getLogger("stoker")

_META, _SEGMENT = "meta.json", "samples.stoker"
_LEAVING = 2.0  # seconds that helpers of a job may take to end after it
_OPENING = 10.0  # seconds for another process to finish opening the same directory
_LEAST_FREE = 1 << 30
_LEAST_FREE_SHARE = 0.05
_PATIENCE = 10.0  # seconds for the processes of a job that just ended to let go of the file


@dataclass(frozen=True)
class DiskMeta:
    """What a disk cache was made for."""

    key: str
    """Stands for the data set's content and the cache stage."""
    num_ids: int
    """Number of samples in the data set."""
    capacity_bytes: int
    """Payload bytes that fit."""
    mean_size: int
    """Expected bytes of a sample; the block size follows from it."""
    version: int = ABI
    """Layout of the segment."""
    local_identity: str = ""
    """Tells the files from others with the same key; see :mod:`stoker.source.base`."""


class CacheDir:
    """A directory for one disk cache; made, marked and described when first used.

    ``path`` need not exist. No method removes or changes a file that is not Stoker's. All raise
    :class:`~stoker.errors.ConfigError` where the directory cannot be used: it is a file, holds
    something else, is not writable, or other users may write to it
    (:class:`~stoker.errors.UntrustedPath`).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path = Path(os.fspath(path)).expanduser().absolute()
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f"disk={path!r} is not a path: {error}") from error
        self.segment = self.path / _SEGMENT
        """What the file with the samples is called."""

    @property
    def identity(self) -> str:
        """Identifies the directory on this machine, independent of the path."""
        with self._open() as folder:
            status = os.fstat(folder.fileno())
        return f"{status.st_dev:x}-{status.st_ino:x}"

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk that samples take here; 0 where there are none."""
        with self._open() as folder:
            return _size(folder)

    def read(self) -> DiskMeta | None:
        """Return what the directory holds; None if nothing, or no such directory.

        Raises :class:`~stoker.errors.StateMismatch` if it holds samples without a description.
        """
        with self._errors_named():
            try:
                folder = owned.open_folder(self.path)
            except FileNotFoundError:
                return None
            with folder:
                return self._read(folder)

    def _read(self, folder: owned.Folder) -> DiskMeta | None:
        owned.check_marked(folder, MARKER, "cache directory")
        if not _size(folder):
            return None
        try:
            named = self.path / _META
            facts = json.loads(owned.read_file(folder.inside / _META, called=named))
            if facts["version"] == ABI:
                found = DiskMeta(**facts)
            else:  # whatever else another version may say, of use is only the size
                found = DiskMeta("", 0, facts["capacity_bytes"], 0, facts["version"])
            for field in fields(DiskMeta):
                value = getattr(found, field.name)
                is_number = type(value) is int and 0 <= value < 1 << 63
                if not (is_number if field.type == "int" else type(value) is str):
                    raise TypeError(f"{field.name} is not valid")
            if found.version == ABI:
                check_sizes(found.num_ids, found.capacity_bytes, found.mean_size)
            return found
        except UntrustedPath:
            raise
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise StateMismatch(
                f"{self.path} holds samples, but its description is unreadable ({error}): "
                f"{self._way_out()}"
            ) from error

    def check(self, wanted: DiskMeta) -> DiskMeta:
        """Return what the directory holds, or ``wanted`` if nothing, or nothing of this layout.

        Raises :class:`~stoker.errors.StateMismatch` unless it is of that data set and size. The
        mean size, which is an estimate, may differ.
        """
        found = self.read()
        if found is None or found.version != wanted.version:
            return wanted
        for name, of_what in (
            ("key", "the data set {}"),
            ("local_identity", "files with the change times {}"),
            ("num_ids", "{} samples"),
            ("capacity_bytes", "a capacity of {}"),
        ):
            has, asks = getattr(found, name), getattr(wanted, name)
            if has != asks:
                if name == "capacity_bytes":
                    has, asks = (f"{format_bytes(v)} ({v} bytes)" for v in (has, asks))
                raise StateMismatch(
                    f"{self.path} was made for {of_what.format(has)}, not {of_what.format(asks)}: "
                    f"{self._way_out()}"
                )
        return found

    def drop_outdated(self, version: int) -> None:
        """Remove samples in the layout of another version of Stoker; tell it in the log.

        To be called with the directory :meth:`locked`. Raises
        :class:`~stoker.errors.SegmentError` while a process uses them.
        """
        found = self.read()
        if found is None or found.version == version:
            return
        if not self.await_unused(_LEAVING):
            raise SegmentError(
                f"{self.path} is in use by a job of another version of Stoker, with layout "
                f"{found.version} and not {version}: end it first, or use another directory"
            )
        with self._open() as folder:
            for name in (_SEGMENT, _META):
                (folder.inside / name).unlink(missing_ok=True)
        log.warning(
            "%s held samples in layout %d of another version of Stoker: they were removed, and "
            "are cached again in layout %d",
            *(self.path, found.version, version),
        )

    def mark(self) -> None:
        """Make the directory, and mark it as Stoker's, unless it is."""
        with self._errors_named():
            owned.adopt(self.path, MARKER, "cache directory").close()

    @contextlib.contextmanager
    def locked(self, patience: float = _OPENING) -> Iterator[None]:
        """Hold a marked directory while its purpose is determined.

        Raises :class:`~stoker.errors.SegmentError` if another process does so for longer than
        ``patience`` seconds.
        """
        with self._open() as folder:
            named = self.path / MARKER
            marker = owned.open_file(folder.inside / MARKER, os.O_RDWR, called=named)
        try:
            with self._errors_named():
                self._await_lock(marker, patience)
            yield
        finally:
            os.close(marker)

    def describe(self, meta: DiskMeta) -> None:
        """Record what the directory is for, safely on disk when this returns; hold it."""
        with self._open() as folder:
            # Before any sample: a segment must never be taken for another data set's.
            owned.write_file(folder.inside / _META, json.dumps(asdict(meta)).encode(), fsync=True)

    @contextlib.contextmanager
    def open_segment(self) -> Iterator[Path]:
        """Give a path to the file with the samples, made empty if need be; of use while it lasts.

        It leads to that very file, even if another one takes its place.
        """
        with self._open() as folder:
            path = folder.inside / _SEGMENT
            os.close(owned.open_file(path, os.O_RDWR | os.O_CREAT, called=self.segment))
            yield path

    def clean(self) -> int:
        """Remove what Stoker has in the directory, and return the bytes freed.

        Raises :class:`~stoker.errors.ConfigError` for a directory without the marker, and
        :class:`~stoker.errors.SegmentError` while a process uses it.
        """
        if not (self.path / MARKER).is_file():
            raise ConfigError(f"{self.path} has no {MARKER}: it is not a disk cache of Stoker")
        with self.locked(), self._open() as folder:
            if not self.await_unused(_LEAVING):
                raise SegmentError(f"{self.path} is in use: end the jobs that use it first")
            freed = _size(folder)
            for name in (_SEGMENT, f"{_META}.new", _META, MARKER):
                (folder.inside / name).unlink(missing_ok=True)
        return freed

    def in_use(self) -> bool:
        """Whether a process has the samples open."""
        with self._open() as folder:
            try:
                path = folder.inside / _SEGMENT
                file = owned.open_file(path, os.O_RDWR, called=self.segment)
            except FileNotFoundError:
                return False
            try:
                return not try_lock(file, start=0, length=1)
            finally:
                os.close(file)

    def await_unused(self, patience: float) -> bool:
        """Wait until no process has the samples open, and return whether that happened."""
        deadline = time.monotonic() + patience
        while self.in_use():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    @contextlib.contextmanager
    def _open(self) -> Iterator[owned.Folder]:
        with self._errors_named(), owned.open_folder(self.path) as folder:
            yield folder

    def _await_lock(self, marker: int, patience: float) -> None:
        if not await_lock(marker, patience):
            raise SegmentError(f"another process is busy with {self.path}: try again later")

    def _way_out(self) -> str:
        return f"run `stoker clean {self.path}`, or use another directory"

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except UntrustedPath:
            raise
        except OSError as error:
            raise ConfigError(
                f"cache directory {str(self.path)!r} cannot be used ({error.strerror}): "
                "use a directory on a local disk that you may write"
            ) from error


def _size(folder: owned.Folder) -> int:
    """Return the bytes that the samples take; 0 where there are none."""
    with contextlib.suppress(FileNotFoundError):
        status = (folder.inside / _SEGMENT).lstat()
        return status.st_blocks * 512 if status.st_size else 0
    return 0


def open_disk(
    folder: CacheDir,
    meta: DiskMeta,
    regions: Sequence[Region],
    *,
    keep_free: int | None = None,
    share: bool = True,
    limit_bytes: int | None = None,
) -> SharedArena:
    """Return the arena in the directory ``folder``, with what earlier runs left there.

    It is made if necessary, and shared with this user's other processes. Samples that it holds
    already go to the first of ``regions``. ``keep_free``: bytes of the file system that making it,
    and its growth, must leave free; by default 1 GiB or 5 %, whichever is more. ``limit_bytes``:
    payload that fits at first, see :meth:`~stoker.store.arena.Arena.limit`; by default all, or as
    much as a file that was there has room for where that is less.

    Raises :class:`~stoker.errors.StateMismatch` if the directory is another data set's or of
    another size, :class:`~stoker.errors.ConfigError` if it cannot be used,
    :class:`~stoker.errors.CapacityError` if there is too little space, and
    :class:`~stoker.errors.SegmentError` if it is in use by a process that does not share it, or
    damaged. Safe in any thread and process.
    """
    folder.check(meta)

    def make() -> Arena:
        with folder.locked():
            folder.drop_outdated(meta.version)
            found = folder.read()
            agreed = folder.check(meta)
            if found is None:
                _check_room(folder.path, agreed, keep_free, limit_bytes)
                folder.describe(agreed)
                return _open_file(folder, agreed, limit_bytes)
            return _open_file(folder, agreed, _spared(folder, agreed, keep_free, limit_bytes))

    folder.mark()
    return open_arena(
        f"{meta.key}-disk-{folder.identity}",
        meta.num_ids,
        meta.capacity_bytes,
        meta.mean_size,
        regions,
        make=make,
        share=share,
        description=f"disk cache in {folder.path}",
    )


def file_bytes(meta: DiskMeta, limit_bytes: int | None = None) -> int:
    """Return the bytes that a disk cache takes on disk while so much payload fits, at most."""
    limit = meta.capacity_bytes if limit_bytes is None else min(limit_bytes, meta.capacity_bytes)
    return core_file_bytes(meta.num_ids, meta.capacity_bytes, meta.mean_size, limit)


def spare_bytes(path: str | os.PathLike[str] | int, keep_free: int | None = None) -> int:
    """Return the bytes that caches may yet take of a file system; see :func:`open_disk`.

    ``path``: of a file or folder there, or a descriptor. Less than 0 where it has less free than
    is to stay so. Raises :class:`OSError`.
    """
    disk = os.statvfs(path)
    least = max(_LEAST_FREE, int(disk.f_blocks * disk.f_frsize * _LEAST_FREE_SHARE))
    return disk.f_bavail * disk.f_frsize - (least if keep_free is None else keep_free)


def shrink_unused(folder: CacheDir, limit_bytes: int) -> int:
    """Let a disk cache that no process uses have so much payload; return the bytes of disk left.

    The youngest samples stay. A job that opens it may have it grow again. Raises
    :class:`~stoker.errors.SegmentError` if it is in use or damaged, and
    :class:`~stoker.errors.ConfigError` if the directory cannot be used.
    """
    with folder.locked(0.0):
        meta = folder.read()
        if meta is None or meta.version != ABI or folder.in_use():
            raise SegmentError(f"{folder.path} is in use, or of another version of Stoker")
        with _open_file(folder, meta, limit_bytes) as arena:
            return arena.disk_bytes


def _open_file(folder: CacheDir, meta: DiskMeta, limit_bytes: int | None) -> Arena:
    """Open the segment, once processes that are leaving it have done so."""
    folder.await_unused(_PATIENCE)
    with folder.open_segment() as path:
        sizes = meta.num_ids, meta.capacity_bytes, meta.mean_size
        try:
            return Arena(*sizes, path, limit_bytes=limit_bytes)
        except SegmentError as error:
            called = str(error).replace(str(path), str(folder.segment))
            raise SegmentError(called) from error


def _spared(
    folder: CacheDir, meta: DiskMeta, keep_free: int | None, limit: int | None
) -> int | None:
    """Return the payload that fits a file which is there, as far as the disk can spare its growth.

    It may have given disk back to others.
    """
    allowed = folder.disk_bytes + max(0, spare_bytes(folder.path, keep_free))
    if file_bytes(meta, limit) <= allowed:
        return limit
    return payload_within(allowed, meta.capacity_bytes, partial(file_bytes, meta))


def _check_room(path: Path, meta: DiskMeta, keep_free: int | None, limit: int | None) -> None:
    free, spare = spare_bytes(path, 0), spare_bytes(path, keep_free)
    needed = file_bytes(meta, limit)
    if needed > spare:
        raise CapacityError(
            f"a disk cache of {format_bytes(meta.capacity_bytes)} takes {format_bytes(needed)} of "
            f"{path}, where {format_bytes(free)} are free and {format_bytes(free - spare)} are to "
            "stay free: ask for a smaller disk_size, or use another disk"
        )


@dataclass(frozen=True)
class Wanted:
    """What there is to cache."""

    key: str
    num_ids: int
    data_bytes: int
    """Of all samples that are visited."""
    whole_bytes: int
    """What a share is a share of: the same, or more where samples are cached smaller than they
    are."""
    everything: int
    """Bytes that hold all of them with certainty; more where sizes are estimates."""
    largest: int
    mean_size: float
    local_identity: str
    """Tells the files from others with the same key; see :mod:`stoker.source.base`."""


class DiskPlan:
    """A disk cache, checked, not opened yet."""

    def __init__(self, folder: CacheDir, meta: DiskMeta, keeps_all: bool) -> None:
        self._folder = folder
        self._meta = meta
        self.keeps_all = keeps_all
        """Whether all samples fit."""

    def announce(self, check: Callable[[str, int, int], int | None]) -> int | None:
        """Tell ``check`` the directory, and the bytes it takes there with all and without samples.

        ``check`` returns the bytes that it may take at first, None: all; raises what that raises.
        Returns the payload bytes that fit in these.
        """
        needed = partial(file_bytes, self._meta)
        whole = needed(self._meta.capacity_bytes)
        now = check(str(self._folder.path), whole, needed(0))
        if now is None or now >= whole:
            return None
        return payload_within(now, self._meta.capacity_bytes, needed)

    def open(
        self,
        regions: Sequence[Region],
        *,
        keep_free: int | None = None,
        limit_bytes: int | None = None,
    ) -> SharedArena:
        """Return the disk cache; arguments and errors are those of :func:`open_disk`."""
        return open_disk(
            self._folder, self._meta, regions, keep_free=keep_free, limit_bytes=limit_bytes
        )


def plan_disk(
    disk: str | os.PathLike[str] | None,
    disk_size: int | float | str | None,
    wanted: Wanted,
    *,
    is_private: bool = False,
    name: str = "disk_size",
) -> DiskPlan | None:
    """Return the disk cache as the user asked for it, or None for none.

    Without ``disk_size`` it has the size of the cache in ``disk``, or holds all samples.
    ``is_private``: the key means nothing to the next run. ``name``: what the user calls the size.

    Raises :class:`~stoker.errors.ConfigError` for invalid sizes or a directory that cannot
    be used, and :class:`~stoker.errors.StateMismatch` for another data set's, or another size.
    """
    if disk is None:
        return None
    asked = wanted.everything
    if disk_size is not None:
        asked = parse_bytes(disk_size, of=wanted.whole_bytes, name=name)
    if asked == 0:
        return None
    if asked < wanted.largest:
        raise ConfigError(
            f"{name}={disk_size!r} is {asked} bytes and the largest sample has "
            f"{wanted.largest}: give it more, or leave it out"
        )
    if is_private:
        raise ConfigError(
            f"disk={str(disk)!r} is invalid, as nothing tells the next run that this is "
            "the same data set: give wrap() a name, or the decoder one"
        )
    folder = CacheDir(disk)
    found = folder.read()
    capacity = min(asked, wanted.everything)
    if disk_size is None and found is not None:
        capacity = found.capacity_bytes or capacity
    meta = DiskMeta(
        wanted.key,
        wanted.num_ids,
        capacity,
        max(1, round(wanted.mean_size)),
        local_identity=wanted.local_identity,
    )
    return DiskPlan(folder, folder.check(meta), capacity >= wanted.everything)

"""Packages as files of one directory, which is marked as Stoker's."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import ConfigError
from stoker.store import unforked
from stoker.store.ofd import try_lock
from stoker.types import format_bytes

MARKER = ".stoker-packages"
"""File that marks a directory as one for packages; nothing is removed from one without it."""

_SUFFIX = ".pkg"
_HARMLESS = {"lost+found"}
_LEAVING = 3.0  # seconds that the process of a job that has ended may take to do so too
_LEAST_FREE = 1 << 30
_LEAST_FREE_SHARE = 0.05


def check_directory(path: Path) -> Path:
    """Return ``path``, a directory for packages or one that can become that.

    Raises :class:`~stoker.errors.ConfigError` if it is a file or holds something else.
    """
    try:
        names = {entry.name for entry in path.iterdir()} - _HARMLESS if path.exists() else set()
    except OSError as error:
        raise ConfigError(f"{path} is no place for packages ({error.strerror})") from error
    if names and MARKER not in names:
        raise ConfigError(
            f"{path} is not empty and not for Stoker's packages (it holds {min(names)!r}): "
            "give an empty or a new directory"
        )
    return path


class DirectoryDepot:
    """See :class:`~stoker.packaging.depot.Depot`. One process at a time uses a ``group`` of names.

    The file system keeps ``keep_free`` bytes free, by default 1 GiB or 5 %, whichever is more. A
    directory that vanishes is made again. A ``private`` one goes with :meth:`close`, and so do
    private ones of dead processes when another is opened.

    Raises :class:`BlockingIOError` if another process uses it, still after ``patience`` seconds.
    """

    def __init__(
        self,
        path: Path,
        group: str,
        private: bool = False,
        keep_free: int | None = None,
        patience: float = _LEAVING,
    ) -> None:
        self._path, self._group, self._private, self._keep_free = path, group, private, keep_free
        if private:
            _remove_abandoned(path)
        self._mark()
        self._lock = _await_locked(self._lock_path, patience)
        if self._lock is None:
            raise BlockingIOError(
                errno.EBUSY, "another job keeps its packages there, give each its own", str(path)
            )

    def names(self) -> list[str]:
        """Return the packages of this group."""
        found = []
        for entry in os.scandir(self._path):
            if entry.name.startswith(self._group + "-"):
                if entry.name.endswith(_SUFFIX):
                    found.append(entry.name)
                else:  # left behind half written
                    self.remove([entry.name])
        return sorted(found)

    def publish(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a package beside its place, and move it there when it is whole."""
        self._check_room(sum(map(len, pieces)))
        fresh = self._path / f"{name}.new"
        try:
            try:
                self._write(fresh, pieces)
            except FileNotFoundError:
                self._mark()
                self._write(fresh, pieces)
            fresh.replace(self._path / name)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        """Return a package, or its first bytes."""
        with (self._path / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            into = memoryview(bytearray(size if num_bytes < 0 else min(size, num_bytes)))
            done = 0
            while done < len(into) and (count := file.readinto(into[done:])):
                done += count
            return into[:done]

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages."""
        for name in names:
            (self._path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let others use it; remove it if it is private."""
        if self._private:
            _remove(self._path)
        if self._lock is not None:
            unforked.drop(self._lock)

    @property
    def _lock_path(self) -> Path:
        return self._path / (MARKER if self._private else f".{self._group}.lock")

    def _mark(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_directory(self._path)
        if self._path.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is another user's", str(self._path))
        (self._path / MARKER).touch(mode=0o600)

    def _write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        with path.open("xb") as file:
            file.writelines(pieces)

    def _check_room(self, num_bytes: int) -> None:
        disk = os.statvfs(self._path if self._path.exists() else self._path.parent)
        total = disk.f_blocks * disk.f_frsize
        floor = self._keep_free
        if floor is None:
            floor = max(_LEAST_FREE, int(total * _LEAST_FREE_SHARE))
        if disk.f_bavail * disk.f_frsize - num_bytes < floor:
            why = f"less than the {format_bytes(floor)} that are to stay free would be left"
            raise OSError(errno.ENOSPC, why, str(self._path))


def _await_locked(path: Path, patience: float) -> unforked.Descriptor | None:
    deadline = time.monotonic() + patience
    while (lock := _locked(path)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return lock


def _locked(path: Path) -> unforked.Descriptor | None:
    """Return the descriptor that holds the lock at ``path``, None if another process does."""
    with unforked.no_fork:
        lock = unforked.keep(unforked.Descriptor(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)))
    if try_lock(lock.fileno()):
        return lock
    unforked.drop(lock)
    return None


def _remove_abandoned(path: Path) -> None:
    """Remove private directories of processes that are dead, but not ``path``."""
    prefix, _, _ = path.name.rpartition("-")
    for other in path.parent.glob(f"{prefix}-*"):
        with contextlib.suppress(OSError):
            status = other.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if other == path or not ours or not (other / MARKER).is_file():
                continue
            lock = _locked(other / MARKER)
            if lock is not None:
                _remove(other)
                unforked.drop(lock)


def _remove(path: Path) -> None:
    """Remove a private directory with its packages, by their names."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.name == MARKER or entry.suffix in (_SUFFIX, ".new"):
                entry.unlink(missing_ok=True)
        path.rmdir()

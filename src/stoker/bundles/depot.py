"""Where packages are kept, and the depot in a directory."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stoker.errors import ConfigError, UntrustedPath
from stoker.node import descriptors, owned
from stoker.node.locks import try_lock_file
from stoker.source.remote.backend import Address, address_of
from stoker.types import format_bytes

Pieces = Sequence[bytes | memoryview]
"""One package, to be written one piece after the other."""

_READ_ONLY = ("http", "https")
_ON_DISK = Path("/var/tmp")  # /tmp may be memory
MARKER = ".stoker-packages"
"""File that marks a directory as one for packages; nothing is removed from one without it."""
_WHAT = "location for packages"
_SUFFIX = ".pkg"
_LEAVING = 3.0  # seconds that the process of a job that has ended may take to do so too
_LEAST_FREE = 1 << 30
_LEAST_FREE_SHARE = 0.05


class Depot(Protocol):
    """Holds packages by name. Used by several threads of the packaging process only.

    All methods raise :class:`OSError` when the location fails: :class:`FileNotFoundError` for a
    package that is not there, with ``ENOSPC`` when it is full.
    """

    def names(self) -> list[str]:
        """Return the packages of this data set and owner, those of earlier runs included."""
        ...

    def publish(self, name: str, pieces: Pieces) -> None:
        """Put a package there: whole, or not at all."""
        ...

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        """Return a package in one read, or its first bytes."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages; missing ones are skipped."""
        ...

    def close(self) -> None:
        """Release the location; a private one is removed with all packages."""
        ...


def location_of(url: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> Path | Address:
    """Return the directory or the prefix of an object store that ``url`` means.

    Raises :class:`~stoker.errors.ConfigError` for a directory that holds something else than
    packages, and for an address that cannot be written to.
    """
    text = os.fspath(url)
    scheme, found, path = text.partition("://")
    if scheme.lower() == "file" and found:
        text, found = "/" + path.lstrip("/"), ""
    if not found:
        if storage_options:
            raise ConfigError(f"url={text!r} is a directory, which has no storage_options")
        return check_directory(Path(text).expanduser().absolute())
    if scheme.lower() in _READ_ONLY:
        raise ConfigError(f"url={text!r} cannot be written to: give a directory, or s3://, gs://")
    address = address_of(text, storage_options)
    if not address.prefix.strip("/"):
        raise ConfigError(f"url={text!r} is a whole bucket: give a prefix of it for packages only")
    return address


def private_location(key: str) -> Path:
    """Return the directory for packages of the job ``key`` for which no location was given."""
    base = _ON_DISK if "TMPDIR" not in os.environ and _ON_DISK.is_dir() else tempfile.gettempdir()
    return Path(base) / f"stoker-packages-{os.geteuid()}-{key}"


def open_depot(location: Path | Address, is_private: bool, group: str, holder: str) -> Depot:
    """Open the depot at ``location`` for packages whose names begin with ``group``.

    ``holder`` (hexadecimal digits) is the same for processes that take each other's place. Call it
    only in the packaging process. Raises :class:`OSError` when the location fails or is
    in use, :class:`~stoker.errors.ConfigError` when it is not Stoker's.
    """
    if isinstance(location, Path):
        return DirectoryDepot(location, group, is_private)
    from stoker.bundles.object_depot import ObjectDepot

    return ObjectDepot(location, group, holder)


def new_name(group: str) -> str:
    """Return a name for a package that was never used before."""
    return f"{group}-{secrets.token_hex(8)}.pkg"


def check_directory(path: Path) -> Path:
    """Return ``path``, a directory for packages or one that can become that.

    Raises :class:`~stoker.errors.ConfigError` if it is a file or holds something else, and
    :class:`~stoker.errors.UntrustedPath` if other users may write there.
    """
    try:
        with owned.open_folder(path) as folder:
            owned.check_marked(folder, MARKER, _WHAT)
    except FileNotFoundError:
        pass
    except UntrustedPath:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot hold packages ({error.strerror})") from error
    return path


class DirectoryDepot:
    """See :class:`~stoker.bundles.depot.Depot`. One process at a time uses a ``group`` of names.

    The file system keeps ``keep_free`` bytes free, by default 1 GiB or 5 %, whichever is more. A
    directory that vanishes is made again. A ``private`` one goes with :meth:`close`, and so do
    private ones of dead processes when another is opened.

    Raises :class:`BlockingIOError` if another process uses it, still after ``patience`` seconds,
    and what :func:`stoker.node.owned.adopt` does.
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
        self._folder = _adopt(path)
        self._lock = _await_locked(self._lock_path, patience)
        if self._lock is None:
            self._folder.close()
            raise BlockingIOError(
                errno.EBUSY, "another job keeps its packages there, give each its own", str(path)
            )

    def names(self) -> list[str]:
        """Return the packages of this group."""
        found = []
        for entry in os.scandir(self._inside):
            if entry.name.startswith(self._group + "-"):
                if entry.name.endswith(_SUFFIX):
                    found.append(entry.name)
                else:  # left behind half written
                    self.remove([entry.name])
        return sorted(found)

    def publish(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a package beside its place, and move it there when it is whole."""
        self._check_room(sum(map(len, pieces)))
        try:
            self._put(name, pieces)
        except FileNotFoundError:  # the directory has vanished
            self._folder.close()
            self._folder = _adopt(self._path)
            self._put(name, pieces)

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        """Return a package, or its first bytes."""
        called = self._path / name
        fd = owned.open_file(self._inside / name, os.O_RDONLY, called=called)
        with os.fdopen(fd, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            into = memoryview(bytearray(size if num_bytes < 0 else min(size, num_bytes)))
            done = 0
            while done < len(into) and (count := file.readinto(into[done:])):
                done += count
            return into[:done]

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages."""
        for name in names:
            (self._inside / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let others use it; remove it if it is private."""
        if self._private:
            _remove(self._folder)
        self._folder.close()
        if self._lock is not None:
            descriptors.drop(self._lock)

    @property
    def _lock_path(self) -> Path:
        return self._inside / (MARKER if self._private else f".{self._group}.lock")

    @property
    def _inside(self) -> Path:
        return self._folder.inside

    def _put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        fresh = self._inside / f"{name}.new"
        try:
            with fresh.open("xb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.writelines(pieces)
            fresh.replace(self._inside / name)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise

    def _check_room(self, num_bytes: int) -> None:
        disk = os.fstatvfs(self._folder.fileno())
        total = disk.f_blocks * disk.f_frsize
        floor = self._keep_free
        if floor is None:
            floor = max(_LEAST_FREE, int(total * _LEAST_FREE_SHARE))
        if disk.f_bavail * disk.f_frsize - num_bytes < floor:
            why = f"less than the {format_bytes(floor)} that must stay free would be left"
            raise OSError(errno.ENOSPC, why, str(self._path))


def _adopt(path: Path) -> owned.Folder:
    return owned.adopt(path, MARKER, _WHAT)


def _await_locked(path: Path, patience: float) -> descriptors.Descriptor | None:
    deadline = time.monotonic() + patience
    while (lock := try_lock_file(path)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return lock


def _remove_abandoned(path: Path) -> None:
    """Remove private directories of processes that are dead, but not ``path``."""
    prefix, _, _ = path.name.rpartition("-")
    for other in path.parent.glob(f"{prefix}-*"):
        with contextlib.suppress(OSError):
            if other == path or other.is_symlink():
                continue
            with owned.open_folder(other) as folder:
                if not (folder.inside / MARKER).is_file():
                    continue
                lock = try_lock_file(folder.inside / MARKER)
                if lock is not None:
                    _remove(folder)
                    descriptors.drop(lock)


def _remove(folder: owned.Folder) -> None:
    """Remove a private directory with its packages, by their names."""
    with contextlib.suppress(OSError):
        for entry in folder.inside.iterdir():
            if entry.name == MARKER or entry.suffix in (_SUFFIX, ".new"):
                entry.unlink(missing_ok=True)
        folder.path.rmdir()

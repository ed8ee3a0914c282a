"""Where packed shards are written to: a folder of this machine, or a bucket."""

from __future__ import annotations

import os
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError, SampleCorrupt, redacted
from stoker.node.descriptors import drop
from stoker.node.locks import try_lock_file
from stoker.node.owned import Folder, adopt, read_file, write_file
from stoker.source.remote.address import OBJECT_SCHEMES, address_of
from stoker.source.remote.writer import Writer
from stoker.source.tar_members import Read
from stoker.types import format_bytes

MARKER = "stoker-pack.json"
"""The file that marks a folder of ours: how it was packed, and which shards are finished."""
_LOCK = "stoker-pack.lock"
_CHUNK_BYTES = 16 << 20  # read at once
_CONCURRENCY = 4
_READ_ONLY = ("http", "https", "file")  # of what obstore reads


class Target(ABC):
    """Takes shards that were written and compared. One process and thread at a time.

    ``name`` is what it is called, and ``scratch`` a folder to write a shard in.
    """

    def __init__(self, name: str, scratch: Path) -> None:
        self.name, self.scratch = name, scratch

    @abstractmethod
    def record(self) -> bytes:
        """Return what was noted last; empty: nothing."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Write a small file, whole or not at all."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the bytes of a file that is there from an earlier call, or None."""

    @abstractmethod
    def take(self, written: Path, name: str) -> None:
        """Make what was ``written`` in :attr:`scratch` the shard of that name."""

    @abstractmethod
    def reader(self, name: str) -> Read:
        """Return what reads bytes of a shard."""

    @abstractmethod
    def address(self, name: str) -> Path | str:
        """Return where a shard is."""

    def has(self, name: str) -> bool:
        """Whether a file is there from an earlier call."""
        return self.size(name) is not None

    def note(self, record: bytes) -> None:
        """Note how far packing is."""
        self.write(MARKER, record)

    def check_space(self, needed: list[int]) -> None:
        """Raise ConfigError where shards of so many bytes have no room."""
        status = os.statvfs(self.scratch)
        free, wanted = status.f_bavail * status.f_frsize, self._space(needed)
        if wanted > free:
            raise ConfigError(
                f"{self._disk} has {format_bytes(free)} free and {format_bytes(wanted)} are "
                "still to be packed: use another disk"
            )

    def _space(self, needed: list[int]) -> int:
        return sum(needed)

    @property
    def _disk(self) -> str:
        return self.name


@contextmanager
def open_target(where: Path | str, options: Mapping[str, Any] | None = None) -> Iterator[Target]:
    """Open a folder, or a bucket at an address like ``s3://bucket/prefix``, to pack into.

    Raises :class:`~stoker.errors.ConfigError` for one with other things in it, a folder that
    another process packs into, and addresses that cannot be written to;
    :class:`~stoker.errors.UntrustedPath` for a folder that others may write to.
    """
    if "://" in str(where):
        with tempfile.TemporaryDirectory(prefix="stoker-pack-") as scratch:
            yield _Bucket(str(where), options, Path(scratch))
        return
    with adopt(Path(where), MARKER, "folder") as opened:
        lock = try_lock_file(opened.inside / _LOCK)
        if lock is None:
            raise ConfigError(f"another process packs into {where}: wait for it")
        try:
            yield _Folder(opened)
        finally:
            drop(lock)


class _Folder(Target):
    """A folder that was adopted and locked."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(str(folder.path), folder.inside)
        self._path = folder.path

    def record(self) -> bytes:
        return read_file(self.scratch / MARKER, called=self._path / MARKER)

    def write(self, name: str, content: bytes) -> None:
        write_file(self.scratch / name, content, fsync=True)

    def size(self, name: str) -> int | None:
        try:
            return (self.scratch / name).lstat().st_size
        except OSError:
            return None

    def take(self, written: Path, name: str) -> None:
        written.rename(self.scratch / name)

    def reader(self, name: str) -> Read:
        return reader_of(self.scratch / name)

    def address(self, name: str) -> Path:
        return self._path / name


class _Bucket(Target):
    """A prefix of a bucket. A shard is written to disk first, then put, then read again."""

    def __init__(self, url: str, options: Mapping[str, Any] | None, scratch: Path) -> None:
        scheme = url.partition("://")[0].lower()
        if scheme not in OBJECT_SCHEMES or scheme in _READ_ONLY:
            raise ConfigError(f"{redacted(url)} cannot be packed into: give a folder or a bucket")
        super().__init__(redacted(url).rstrip("/"), scratch)
        address = address_of(url.rstrip("/") + "/", options)
        self._root, self._prefix = address.root, address.prefix
        self._writer = Writer(address, _CONCURRENCY)
        found = self._writer.all(self._prefix)
        self._sizes = {each.key.decode()[len(self._prefix) :]: each.size for each in found}
        if self._sizes and MARKER not in self._sizes:
            raise ConfigError(
                f"{self.name} is not empty and not Stoker's (there is {min(self._sizes)!r}): give "
                "a prefix of its own"
            )

    def record(self) -> bytes:
        return bytes(self._writer.get(self._key(MARKER))) if MARKER in self._sizes else b""

    def write(self, name: str, content: bytes) -> None:
        self._writer.put(self._key(name), content)

    def size(self, name: str) -> int | None:
        return self._sizes.get(name)

    def take(self, written: Path, name: str) -> None:
        self._writer.put_file(self._key(name), written)
        size = written.stat().st_size
        here, there = reader_of(written), self.reader(name)
        for start in range(0, size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, size - start)
            if zlib.crc32(here(start, length)) != zlib.crc32(there(start, length)):
                raise SampleCorrupt(f"{self.address(name)} was not stored as it was written")
        self._sizes[name] = size
        written.unlink()

    def reader(self, name: str) -> Read:
        return lambda start, length: self._writer.get(self._key(name), start, length)

    def address(self, name: str) -> str:
        return f"{self.name}/{name}"

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _space(self, needed: list[int]) -> int:
        return max(needed, default=0)  # one after the other

    @property
    def _disk(self) -> str:
        return str(self.scratch)


def reader_of(path: Path) -> Read:
    """Return what reads bytes of a file."""

    def read(start: int, length: int) -> memoryview:
        with path.open("rb") as file:
            return memoryview(os.pread(file.fileno(), length, start))

    return read

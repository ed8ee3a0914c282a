"""The file format of a trace: blocks of columns, appended one by one, each with a checksum.

A file begins with :data:`MAGIC`; the last byte of it is the version of the format. Blocks follow:
the head :data:`_HEAD` (kind, epoch, bytes as stored, bytes before compression, CRC-32 of all that
and of the payload), then the payload, compressed by zlib. A payload is the length of a JSON list
of (name, dtype, length), that list, and the columns' bytes: all first bytes, then all second ones,
and so on, which compresses better. All numbers are little-endian. A file that was cut off in the
midst of a block, or damaged there, is good up to that block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
import weakref
import zlib
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.node.owned import open_file

VERSION = 1
"""Of the format."""

MAGIC = b"stkrtrc" + bytes([VERSION])
"""What a file begins with."""

Columns = Mapping[str, NDArray[Any]]
"""Arrays of one dimension, by name."""

_HEAD = struct.Struct("<BIIII")
_LEVEL = 1  # of compression: the quickest
_LIMIT = 1 << 30  # bytes of a block; what says more is damaged


class Kind(IntEnum):
    """What a block holds."""

    ABOUT = 1
    """What the run was, as JSON in the one column ``json u8``."""
    SIZES = 2
    """Some samples' sizes, ``sizes``; their ids follow those of the block before."""
    ROWS = 3
    """What happened in an epoch; :mod:`stoker.sim.trace` has the columns."""
    BEGIN = 4
    """Like ROWS, and the epoch began here."""


class Block(NamedTuple):
    """Where a whole block stands in its file."""

    kind: Kind
    epoch: int
    start: int
    """Of the head."""
    stored: int
    """Bytes of the payload."""

    @property
    def end(self) -> int:
        """Where the next block begins."""
        return self.start + _HEAD.size + self.stored


class TraceWriter:
    """Appends blocks to a file, each by one write. Used by one thread.

    An existing file is appended to, after its last whole block, if its ABOUT says
    the same; else ConfigError. Raises OSError when the file cannot be written, or another process
    is writing it, UntrustedPath for one that other users could have written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], sizes: NDArray[np.int64]) -> None:
        self._fd = open_file(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            end = check_continues(path, about)
            _lock(self._fd)
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, end, os.SEEK_SET)
            if not end:
                self._begin(about, sizes)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, kind: Kind, epoch: int, columns: Columns) -> None:
        """Append one block."""
        payload = _packed(columns)
        stored = zlib.compress(payload, _LEVEL)
        check = _check(kind, epoch, len(payload), stored)
        _write(self._fd, _HEAD.pack(kind, epoch, len(stored), len(payload), check) + stored)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _begin(self, about: Mapping[str, Any], sizes: NDArray[np.int64]) -> None:
        _write(self._fd, MAGIC)
        text = json.dumps(about).encode()
        self.append(Kind.ABOUT, 0, {"json": np.frombuffer(text, np.uint8)})
        for start in range(0, len(sizes), 1 << 18):
            self.append(Kind.SIZES, 0, {"sizes": _narrow(sizes[start : start + (1 << 18)])})


def check_continues(path: Path, about: Mapping[str, Any]) -> int:
    """Return where the run of which ``about`` tells may append to the file at ``path``.

    0 where nothing has happened yet. Raises :class:`~stoker.errors.ConfigError` for the trace of
    another run, for what is no trace, and for what cannot be read.
    """
    try:
        if not path.exists() or not path.stat().st_size:
            return 0
        with TraceReader(path) as there:
            blocks, found = there.blocks, there.about
    except OSError as error:
        raise ConfigError(f"trace={str(path)!r} cannot be appended to: {error}") from error
    for name, value in about.items() if blocks else ():
        if found.get(name) != value:
            raise ConfigError(
                f"trace={str(path)!r} is there already, of a run with {name}={found.get(name)!r} "
                f"where this one has {value!r}: give another path, or remove it"
            )
    has_rows = any(block.kind not in (Kind.ABOUT, Kind.SIZES) for block in blocks)
    return blocks[-1].end if has_rows else 0


class TraceReader:
    """The whole blocks of a trace, in order, as :attr:`blocks`; read one at a time.

    Also a context manager. Raises :class:`~stoker.errors.ConfigError` for what is no trace of this
    version, and OSError when the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._check_magic()
        self.blocks = self._scan()
        self.about: dict[str, Any] = {}
        """What the run was."""
        if self.blocks:
            with damage_named(f"{path} does not say of which run it is"):
                self.about = dict(json.loads(self.read(self.blocks[0])["json"].tobytes()))

    def read(self, block: Block) -> dict[str, NDArray[Any]]:
        """Return the columns of a block; ConfigError if it is damaged."""
        found = self._payload(block)
        with damage_named(f"{self._path} is damaged at byte {block.start}"):
            if found is None:
                raise ValueError("its sum is wrong")
            return _unpacked(found)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_magic(self) -> None:
        begin = os.pread(self._fd, len(MAGIC), 0)
        if begin[:-1] != MAGIC[:-1]:
            raise ConfigError(f"{self._path} is no trace: give what Loader(trace=PATH) wrote")
        if begin != MAGIC:
            raise ConfigError(
                f"{self._path} is a trace of version {begin[-1]}, and this Stoker reads {VERSION}: "
                "read it with the Stoker that wrote it"
            )

    def _scan(self) -> list[Block]:
        """Return the blocks up to the first that is not whole."""
        size, start = os.fstat(self._fd).st_size, len(MAGIC)
        blocks: list[Block] = []
        while start + _HEAD.size <= size:
            kind, epoch, stored, _, _ = _HEAD.unpack(os.pread(self._fd, _HEAD.size, start))
            if kind not in iter(Kind) or stored > min(_LIMIT, size - start - _HEAD.size):
                break
            if bool(blocks) == (kind == Kind.ABOUT):  # comes once, at first
                break
            blocks.append(Block(Kind(kind), epoch, start, stored))
            start = blocks[-1].end
        # Only the last one can be half there after a crash: a block is one write at the end.
        if blocks and self._payload(blocks[-1]) is None:
            blocks.pop()
        return blocks

    def _payload(self, block: Block) -> bytes | None:
        head = os.pread(self._fd, _HEAD.size, block.start)
        kind, epoch, length, raw, check = _HEAD.unpack(head)
        stored = os.pread(self._fd, length, block.start + _HEAD.size)
        if len(stored) != length or raw > _LIMIT or check != _check(kind, epoch, raw, stored):
            return None
        try:
            # Not at once as much as it claims to be.
            found = zlib.decompressobj().decompress(stored, raw + 1)
        except zlib.error:
            return None
        return found if len(found) == raw else None


@contextlib.contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Make a ConfigError of what reading a file raises whose sums are right and which is wrong."""
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{what} ({error!r}): record it again, or cut it there") from error


def _check(kind: int, epoch: int, raw: int, stored: bytes) -> int:
    return zlib.crc32(stored, zlib.crc32(_HEAD.pack(kind, epoch, len(stored), raw, 0)))


def _lock(fd: int) -> None:
    """Let no other process write the file as long as this one has it open."""
    try:
        # Of the process, so that workers that outlive it do not hold it.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(error.errno, "another process is writing it") from error
        # A file system without locks: one writer is up to the user.


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _narrow(values: NDArray[np.int64]) -> NDArray[Any]:
    """Return values of 0 or more in 32 bits if they fit."""
    fits = not len(values) or int(values.max()) < 2**32
    return values.astype("<u4") if fits else values.astype("<i8")


def _packed(columns: Columns) -> bytes:
    arrays = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    arrays = {name: a.astype(a.dtype.newbyteorder("<")) for name, a in arrays.items()}
    names = json.dumps([(name, a.dtype.str, len(a)) for name, a in arrays.items()]).encode()
    shuffled = (a.view(np.uint8).reshape(-1, a.itemsize).T.tobytes() for a in arrays.values())
    return b"".join([len(names).to_bytes(4, "little"), names, *shuffled])


def _unpacked(payload: bytes) -> dict[str, NDArray[Any]]:
    start = 4 + int.from_bytes(payload[:4], "little")
    columns = {}
    for name, dtype, length in json.loads(payload[4:start]):
        kind = np.dtype(dtype)
        shuffled = np.frombuffer(payload, np.uint8, length * kind.itemsize, start)
        column = np.ascontiguousarray(shuffled.reshape(kind.itemsize, length).T)
        columns[name] = column.reshape(-1).view(kind)
        start += len(shuffled)
    return columns

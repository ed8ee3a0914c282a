"""Finds the files in a tar archive without reading what is in them, where that pays."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stoker.errors import ConfigError, SampleCorrupt

Read = Callable[[int, int], memoryview]
"""Returns bytes of the archive: so many from this position, fewer where it ends."""

_BLOCK = tarfile.BLOCKSIZE
_WINDOW = 8 << 20
_HEADERS = 8 * _BLOCK  # a header, with those of pax or GNU before it
_MOST_DIGITS = 20  # of a size, or of a record's length
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_LONGEST_EXTENSION = 1 << 20  # bytes of a pax or GNU header, which may hold more than a name
_LONGEST_NAME = 4096  # bytes, as in the kernel


@dataclass(frozen=True)
class Member:
    """A regular file in the archive."""

    path: str
    start: int
    """Where its data begin."""
    size: int
    """Bytes of data."""


def members(read: Read, size: int, seek_bytes: int) -> Iterator[Member]:
    """Yield the regular files of an archive of ``size`` bytes, in order.

    Understands ustar, pax (paths and sizes of any length) and GNU long names. Data of up to
    ``seek_bytes`` is read along, because a new request would cost more; larger data is skipped.
    Raises :class:`SampleCorrupt` for a header that is damaged or cut off, for names of more than
    4,096 bytes or with a NUL, and for sparse files; :class:`ConfigError` for a compressed archive.
    Whatever the bytes are, it gets on by a block of 512 with every header.
    """
    window = _Window(read, size, seek_bytes)
    at = 0
    pax: dict[str, str] = {}
    whole_archive: dict[str, str] = {}
    while at < size:
        block = window.get(at, _BLOCK)
        if at == 0:
            _refuse_compressed(block)
        if not any(block):
            return
        info = _header(block, at)
        start = at + _BLOCK
        num_bytes = _data_bytes(info, pax)
        if not 0 <= num_bytes <= size - start:
            raise SampleCorrupt(
                f"{info.name!r} at byte {at} claims {num_bytes} bytes, and the archive has "
                f"{size - start} from there: it is damaged or cut off"
            )
        at = start + -(-num_bytes // _BLOCK) * _BLOCK
        if info.type in _EXTENSIONS:
            if num_bytes > _LONGEST_EXTENSION:
                raise SampleCorrupt(f"a header at byte {start - _BLOCK} claims {num_bytes} bytes")
            _extend(info.type, window.get(start, num_bytes), pax, whole_archive)
            continue
        if info.type == tarfile.GNUTYPE_SPARSE or any("GNU.sparse" in name for name in pax):
            raise SampleCorrupt(f"{info.name!r} is a sparse file: pack the archive without them")
        if info.isreg():
            path = pax.get("path", whole_archive.get("path", info.name))
            yield Member(_checked(path, start), start, num_bytes)
        pax = {}


_EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class _Window:
    """The part of the archive that was read last."""

    def __init__(self, read: Read, size: int, seek_bytes: int) -> None:
        self._read, self._size, self._seek_bytes = read, size, seek_bytes
        self._begin, self._data = 0, memoryview(b"")
        self._next = max(_HEADERS, seek_bytes // 8)

    def get(self, at: int, num_bytes: int) -> memoryview:
        """Return bytes, reading on if need be. Raises SampleCorrupt at the archive's end."""
        end = at + num_bytes
        if end > self._size:
            raise SampleCorrupt(f"the archive of {self._size} bytes is cut off in a header")
        have = self._begin + len(self._data)
        if end > have:
            # Close by: read on in growing windows. Far: the next header, and a little more.
            near = at - have <= self._seek_bytes
            self._next = min(2 * self._next, _WINDOW) if near else _HEADERS
            self._begin = at
            self._data = self._read(at, min(max(num_bytes, self._next), self._size - at))
        begin = at - self._begin
        if begin + num_bytes > len(self._data):
            raise SampleCorrupt(f"the archive of {self._size} bytes ended at byte {at}")
        return self._data[begin : begin + num_bytes]


def _data_bytes(info: tarfile.TarInfo, pax: dict[str, str]) -> int:
    """Return the bytes of data behind a header; folders, links and devices have none."""
    if info.type in _EXTENSIONS:
        return info.size
    if not info.isreg() and info.type in tarfile.SUPPORTED_TYPES:
        return 0
    digits = pax.get("size")
    if digits is None:
        return info.size
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS):
        raise SampleCorrupt(f"a pax header gives {info.name!r} the size {digits[:40]!r}")
    return int(digits)


def _checked(path: str, start: int) -> str:
    """Return the name of the file whose data begin at ``start``, if it can be one."""
    if "\0" in path or len(path) > _LONGEST_NAME:
        raise SampleCorrupt(
            f"the file at byte {start} has a name of {len(path)} characters that begins with "
            f"{path[:80]!r}: names have up to {_LONGEST_NAME} and no NUL"
        )
    return path


def _header(block: memoryview, at: int) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(bytes(block), tarfile.ENCODING, "surrogateescape")
    except tarfile.TarError as error:
        raise SampleCorrupt(f"the header at byte {at} is not one of a tar file: {error}") from error


def _refuse_compressed(block: memoryview) -> None:
    for magic, name in _COMPRESSED.items():
        if bytes(block[: len(magic)]) == magic:
            raise ConfigError(
                f"the archive is compressed with {name}, so samples in it cannot be read one by "
                "one: unpack it to a plain .tar (images do not get smaller anyway)"
            )


def _extend(
    kind: bytes, data: memoryview, pax: dict[str, str], whole_archive: dict[str, str]
) -> None:
    """Note what a header says of the next file, or of all that follow."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        pax["path"] = bytes(data).rstrip(b"\0").decode("utf-8", "surrogateescape")
    elif kind == tarfile.XGLTYPE:
        whole_archive.update(_pax_records(bytes(data)))
    elif kind != tarfile.GNUTYPE_LONGLINK:
        pax.update(_pax_records(bytes(data)))


def _pax_records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the records of a pax header: ``<length> <name>=<value>`` and a line feed each."""
    at = 0
    while at < len(data) and data[at : at + 1] != b"\0":
        digits, _, _ = data[at : at + _MOST_DIGITS].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = data[at + len(digits) + 1 : at + length]
        name, is_record, value = record[:-1].partition(b"=")
        if length > len(data) - at or not (name and is_record and record.endswith(b"\n")):
            raise SampleCorrupt(f"a pax header has a bad record at byte {at}")
        yield name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")
        at += length

"""Where each sample of a set of tar shards lies, in a few arrays.

The files in a tar archive are found without reading what is in them, where that pays.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source.listing import Arrays
from stoker.source.packed import HEADER, Bytes, Offsets, offsets_of

Codes = npt.NDArray[np.uint32]
_UNPAIRED = re.compile("[\ud800-\udfff]")  # what surrogateescape makes of other encodings
_META = re.compile(r"__[^/]*__($|/)")  # WebDataset leaves these files and folders out
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


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """N samples of P parts, in the order of the shards and of the files in them."""

    first: Offsets
    """The first part of each sample, and P at the end, i64[N + 1]."""
    shards: Codes
    """The shard of each part, u32[P]."""
    starts: Offsets
    """Where its data begin in the shard, i64[P]."""
    sizes: Offsets
    """Bytes of its data, i64[P]."""
    kinds: Codes
    """Which of ``extensions`` its file has, u32[P]."""
    extensions: tuple[str, ...]
    names: Bytes
    """The key of each sample, one after the other, u8[total]."""
    offsets: Offsets
    """Where each key begins, i64[N + 1]."""

    def only(self, extensions: Sequence[str]) -> ShardIndex:
        """Return the index with one part for each sample: the first that has one of these.

        Raises :class:`ConfigError` when a sample has no such part.
        """
        rank = np.full(len(self.extensions) + 1, len(extensions), np.int64)
        for number, extension in reversed(list(enumerate(extensions))):
            if extension in self.extensions:
                rank[self.extensions.index(extension)] = number
        found = rank[self.kinds]
        sample = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        order = np.lexsort((np.arange(len(found)), found, sample))
        chosen = order[self.first[:-1]]
        lacking = np.flatnonzero(found[chosen] == len(extensions))
        if len(lacking):
            key = self.key(int(lacking[0]))
            raise ConfigError(
                f"part={';'.join(extensions)!r}: {len(lacking)} samples have no such part, the "
                f"first is {key!r}; there are {', '.join(sorted(self.extensions))}"
            )
        return ShardIndex(
            np.arange(len(chosen) + 1),
            self.shards[chosen],
            self.starts[chosen],
            self.sizes[chosen],
            self.kinds[chosen],
            self.extensions,
            self.names,
            self.offsets,
        )

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        begin, end = self.offsets[sample : sample + 2]
        return self.names[begin:end].tobytes().decode("utf-8", "surrogateescape")

    def framed_sizes(self) -> Offsets:
        """Return the bytes of each sample with its parts framed, i64[N]."""
        headers = [HEADER.size + len(name.encode()) for name in self.extensions]
        framed = self.sizes + np.array(headers, np.int64)[self.kinds]
        total: Offsets = np.diff(offsets_of(framed)[self.first])
        return total

    def of_shards(self, chosen: Offsets) -> ShardIndex:
        """Return the index that these shards (i64[S], in any order) alone would have.

        Samples have to be in the order of the shards, as :meth:`check` asks.
        """
        shard_of = self.shards[self.first[:-1]]
        begins, ends = (np.searchsorted(shard_of, chosen, side) for side in ("left", "right"))
        samples = _ranges(begins, ends - begins)
        counts = np.diff(self.first)[samples]
        parts = _ranges(self.first[samples], counts)
        lengths = np.diff(self.offsets)[samples]
        renumbered = np.zeros(1 + int(max(chosen.max(), shard_of.max())), np.uint32)
        renumbered[chosen] = np.arange(len(chosen))
        # Extensions are numbered as they first come.
        found, firsts, kinds = np.unique(self.kinds[parts], return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        return ShardIndex(
            first=offsets_of(counts),
            shards=renumbered[self.shards[parts]],
            starts=self.starts[parts],
            sizes=self.sizes[parts],
            kinds=np.argsort(order)[kinds].astype(np.uint32),
            extensions=tuple(self.extensions[kind] for kind in found[order].tolist()),
            names=self.names[_ranges(self.offsets[:-1][samples], lengths)],
            offsets=offsets_of(lengths),
        )

    def check(self, sizes: Offsets) -> None:
        """Raise SampleCorrupt unless it makes sense for shards of ``sizes`` bytes, i64[S]."""
        samples, parts = len(self.first) - 1, len(self.shards)
        kinds = {"first": "i8", "starts": "i8", "sizes": "i8", "offsets": "i8"}
        kinds |= {"shards": "u4", "kinds": "u4", "names": "u1"}
        is_sound = (
            all(getattr(self, name).dtype == kind for name, kind in kinds.items())
            and all(getattr(self, name).ndim == 1 for name in kinds)
            and samples > 0
            and len(self.starts) == len(self.sizes) == len(self.kinds) == parts
            and _divides(self.first, parts)
            and bool((np.diff(self.first) > 0).all())
            and len(self.offsets) == samples + 1
            and _divides(self.offsets, len(self.names))
            and int(self.shards.max()) < len(sizes)
            and int(self.kinds.max()) < len(self.extensions)
        )
        if is_sound:
            ends = sizes[self.shards] - self.sizes
            within = (self.sizes >= 0) & (self.starts >= 0) & (self.starts <= ends)
            # The parts of a sample follow each other in one shard.
            goes_on = np.ones(parts, np.bool_)
            goes_on[self.first[:-1]] = False
            follows = np.diff(self.starts, prepend=0) >= 0
            follows &= np.diff(self.shards.astype(np.int64), prepend=0) == 0
            in_order = np.diff(self.shards.astype(np.int64)) >= 0
            is_sound = bool(within.all() and follows[goes_on].all() and in_order.all())
        if not is_sound:
            raise SampleCorrupt("the index does not fit the shards")

    @property
    def fingerprint(self) -> str:
        """Hash of where everything lies."""
        digest = hashlib.blake2b(digest_size=16, person=b"stoker.shards")
        for array in self.as_arrays().values():
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def as_arrays(self) -> Arrays:
        """Return the index as arrays by name."""
        fields: dict[str, Any] = {**vars(self)}
        fields["extensions"] = np.frombuffer("\0".join(self.extensions).encode(), np.uint8)
        return fields

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> ShardIndex:
        """Return what :meth:`as_arrays` was made from."""
        extensions = tuple(arrays["extensions"].tobytes().decode().split("\0"))
        return cls(**{**arrays, "extensions": extensions})  # type: ignore[arg-type]


def _ranges(begins: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Offsets:
    """Return the numbers of ranges one after the other, ``counts`` [n] from ``begins`` [n] on."""
    before = np.cumsum(counts) - counts
    numbers: Offsets = np.arange(int(counts.sum())) + np.repeat(begins - before, counts)
    return numbers


def _divides(bounds: Offsets, total: int) -> bool:
    """Whether bounds go from 0 to ``total`` and never down."""
    return bool(bounds[0] == 0 and bounds[-1] == total and (np.diff(bounds) >= 0).all())


def index_of(shards: Iterable[Sequence[Member]], name: Callable[[int], str]) -> ShardIndex:
    """Return the index of the files of each shard; ``name(i)`` says what shard ``i`` is called.

    As in WebDataset, a file's key is its path up to the first dot of the file name, the rest is
    its extension, in lower case; consecutive files of one key are one sample. Files without an
    extension, hidden ones and those in folders called ``__like_this__`` are left out.

    Raises :class:`SampleCorrupt` for a sample that has two parts of one extension and for one that
    is not UTF-8, and :class:`ConfigError` when there are no samples.
    """
    builder = _Builder()
    for number, files in enumerate(shards):
        builder.begin_shard()
        for file in files:
            try:
                builder.add(number, file)
            except ValueError as error:
                raise SampleCorrupt(f"{name(number)}: {file.path!r} {error}") from error
    return builder.finish()


class _Builder:
    def __init__(self) -> None:
        self._first: list[int] = []
        self._parts: list[tuple[int, int, int, int]] = []
        self._keys: list[bytes] = []
        self._extensions: dict[str, int] = {}
        self._key: str | None = None
        self._seen: set[int] = set()

    def begin_shard(self) -> None:
        """No sample continues in the next shard."""
        self._key = None

    def add(self, shard: int, file: Member) -> None:
        """Add a file; raises ValueError for one that its sample cannot have."""
        folder, slash, base = file.path.removeprefix("./").rpartition("/")
        stem, dot, extension = base.partition(".")
        if not stem or not dot or _META.match(file.path):
            return
        extension = extension.lower()
        if _UNPAIRED.search(extension):
            raise ValueError("has an extension that is not UTF-8")
        key = folder + slash + stem
        if key != self._key:
            self._key = key
            self._seen = set()
            self._first.append(len(self._parts))
            self._keys.append(key.encode("utf-8", "surrogateescape"))
        kind = self._extensions.setdefault(extension, len(self._extensions))
        if kind in self._seen:
            raise ValueError("is the second part of its sample with that extension")
        self._seen.add(kind)
        self._parts.append((shard, file.start, file.size, kind))

    def finish(self) -> ShardIndex:
        """Return the index."""
        if not self._parts:
            raise ConfigError(
                "the shards contain no samples: files are expected to be called key.extension"
            )
        parts = np.array(self._parts, np.int64)
        lengths = np.fromiter(map(len, self._keys), np.int64, len(self._keys))
        return ShardIndex(
            first=np.array([*self._first, len(parts)], np.int64),
            shards=parts[:, 0].astype(np.uint32),
            starts=np.ascontiguousarray(parts[:, 1]),
            sizes=np.ascontiguousarray(parts[:, 2]),
            kinds=parts[:, 3].astype(np.uint32),
            extensions=tuple(self._extensions),
            names=np.frombuffer(b"".join(self._keys), np.uint8),
            offsets=offsets_of(lengths),
        )


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

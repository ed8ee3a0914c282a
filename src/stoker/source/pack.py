"""Packs samples into tar shards, of which one request reads many: what ``stoker pack`` does.

They are written to a folder of this machine, or a bucket.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SampleCorrupt, SourceError, redacted
from stoker.node.descriptors import drop
from stoker.node.locks import try_lock_file
from stoker.node.owned import Folder, adopt, read_file, write_file
from stoker.source.base import Source, in_batches, read_whole
from stoker.source.image_folder import ClassFolders
from stoker.source.remote.backend import OBJECT_SCHEMES, address_of
from stoker.source.remote.obstore_backend import Writer
from stoker.source.shard_index import Read, members
from stoker.source.shards import INDEX, Layout, ShardSource, index_to_bytes, layout_of
from stoker.types import format_bytes

MARKER = "stoker-pack.json"
"""The file that marks a folder of ours: how it was packed, and which shards are finished."""
Ids = NDArray[np.uint32]
_FORM = 1
_CHUNK_BYTES, _CHUNK_SAMPLES = 16 << 20, 1024  # read at once
_END = bytes(2 * tarfile.BLOCKSIZE)  # of an archive
_OVERHEAD = 2 * tarfile.BLOCKSIZE  # of a sample: its header, and padding
_ALIGNED = tarfile.BLOCKSIZE
_SEEK = 64 << 10  # bytes rather read along than skipped
_EXTENSION = re.compile(r"\.([A-Za-z0-9]{1,10})$")
_META = re.compile(r"__.*__$")  # folders that WebDataset leaves out
_LOCK = "stoker-pack.lock"
_CONCURRENCY = 4
_READ_ONLY = ("http", "https", "file")  # of what obstore reads


@dataclass
class Packed:
    """What became of the samples."""

    shards: list[Path | str] = field(default_factory=list)
    """The archives, in order: paths, or addresses in a bucket."""
    samples: int = 0
    """Samples in them."""
    bytes: int = 0
    """Bytes of the archives."""
    present: int = 0
    """Samples in archives that an earlier call had finished."""
    left_out: dict[int, SourceError] = field(default_factory=dict)
    """Samples of this call that cannot be read, and why."""


def pack(
    source: Source,
    where: Path | str,
    *,
    shard_bytes: int = 256 << 20,
    seed: int | None = 0,
    leave_out: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda samples, size: None,
) -> Packed:
    """Write the samples of ``source`` to ``where/shard-000000.tar`` and so on, and their index.

    ``where`` is a folder, or the address of a prefix in a bucket, like ``s3://bucket/packed``, with
    ``storage_options`` as :class:`~stoker.source.objects.ObjectSource` takes them.

    They are shuffled by ``seed``, so that neighbours are as good as drawn at random; with ``None``
    they keep their order. A shard ends when it has ``shard_bytes`` of samples. A sample of a
    source with classes is ``class/number.extension``, one of shards has its key and its parts, any
    other is ``number.extension``: ``number`` is its id in ``source``. Each shard is read again and
    compared before it gets its name; in a bucket, where a shard is put from a temporary file, once
    more afterwards. A call that was interrupted is resumed by the same call: only
    shards that are not finished are written. ``progress`` gets samples and bytes as they are done.
    The index is of all shards together: by it :class:`~stoker.source.shards.ShardSource` knows them
    without reading them.

    Raises :class:`~stoker.errors.ConfigError` for a place with other things in it, a folder that
    another process packs into, one that was packed from other samples or in another way, too little
    space on the disk, and no samples; :class:`~stoker.errors.UntrustedPath` for a folder that
    others may write to; :class:`~stoker.errors.SourceError` for a sample that cannot be read, which
    ``leave_out`` leaves out instead; and :class:`OSError`. One process and thread at a time.
    """
    if not len(source):
        raise ConfigError("there are no samples to pack")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes}: give 1 or more")
    with open_target(where, storage_options) as target:
        return _Packer(source, target, shard_bytes, seed, leave_out, progress).run()


def packed_shards(folder: str | Path) -> list[str] | None:
    """Return the shards in a folder that :func:`pack` made; None for any other address.

    Raises :class:`~stoker.errors.ConfigError` if they are not complete.
    """
    try:
        content = (Path(folder) / MARKER).read_bytes()
    except (OSError, ValueError):
        return None
    plan, shards = _parsed(content, str(folder)) if content else ({}, {})
    if len(shards) != plan.get("shards"):
        raise ConfigError(f"{folder} is not packed to the end: run the same `stoker pack` again")
    return [str(Path(folder) / _name(number)) for number in sorted(shards)]


def _parsed(record: bytes, where: str) -> tuple[dict[str, Any], dict[int, tuple[int, int]]]:
    """Return how a folder was packed, and bytes and samples of its finished shards by number."""
    try:
        told = json.loads(record)
        shards = {int(n): (int(size), int(count)) for n, (size, count) in told["shards"]}
        return dict(told["plan"]), shards
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}/{MARKER} is damaged ({error}): remove all of it") from error


def _name(number: int) -> str:
    return f"shard-{number:06d}.tar"


class _Packer:
    def __init__(
        self,
        source: Source,
        target: Target,
        shard_bytes: int,
        seed: int | None,
        leave_out: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        self._source, self._target, self._leave_out = source, target, leave_out
        self._progress = progress
        self._layouts: dict[int, Layout] = {}  # of the shards of this call
        self._check_classes()
        ids = np.arange(len(source), dtype=np.uint32)
        order = ids if seed is None else np.random.default_rng(seed).permutation(ids)
        ends = np.cumsum(source.sizes[order] + _OVERHEAD)
        self._shards = np.split(order, np.flatnonzero(np.diff((ends - 1) // shard_bytes)) + 1)
        self._plan = {
            "form": _FORM,
            "fingerprint": source.fingerprint,
            "samples": len(source),
            "shards": len(self._shards),
            "shard_bytes": shard_bytes,
            "seed": seed,
        }

    def run(self) -> Packed:
        """Write what is missing."""
        packed, finished = Packed(), self._finished()
        left = [ids for number, ids in enumerate(self._shards) if number not in finished]
        self._target.check_space([self._num_bytes(ids) for ids in left])
        for number, ids in enumerate(self._shards):
            if number in finished:
                packed.present += finished[number][1]
                self._progress(len(ids), int(self._source.sizes[ids].sum()))
            else:
                finished[number] = self._write(number, ids, packed.left_out)
                self._note(finished)
            packed.shards.append(self._target.address(_name(number)))
            packed.bytes += finished[number][0]
            packed.samples += finished[number][1]
        if packed.samples and not (left == [] and self._target.has(INDEX)):
            self._write_index([finished[number][0] for number in range(len(self._shards))])
        return packed

    def _num_bytes(self, ids: Ids) -> int:
        return int((self._source.sizes[ids] + _OVERHEAD).sum())

    def _check_classes(self) -> None:
        if isinstance(self._source, ClassFolders):
            for name in self._source.classes:
                if _META.match(name):
                    raise ConfigError(
                        f"class {name!r} would be left out by readers of shards, which skip "
                        "folders called __like_this__: rename it"
                    )

    def _finished(self) -> dict[int, tuple[int, int]]:
        """Return bytes and samples of the finished shards by number, from an earlier call."""
        content = self._target.record()
        if not content:
            return {}
        plan, shards = _parsed(content, self._target.name)
        if plan != self._plan:
            differs = [name for name, value in self._plan.items() if plan.get(name) != value]
            raise ConfigError(
                f"{self._target.name} was packed from other samples or in another way (other "
                f"{', '.join(differs)}): use a new folder"
            )
        return {n: shard for n, shard in shards.items() if self._target.size(_name(n)) == shard[0]}

    def _note(self, finished: dict[int, tuple[int, int]]) -> None:
        record = {"plan": self._plan, "shards": sorted(finished.items())}
        self._target.note(json.dumps(record).encode())

    def _write_index(self, sizes: list[int]) -> None:
        """Write the index of all shards; those of earlier calls are read for it."""
        layouts = [
            self._layouts.get(number) or self._layout(self._target.reader(_name(number)), size)
            for number, size in enumerate(sizes)
        ]
        self._target.write(INDEX, index_to_bytes(layouts, _name, sizes))

    @staticmethod
    def _layout(read: Read, num_bytes: int) -> Layout:
        return layout_of(list(members(read, num_bytes, _SEEK)), read)

    def _write(self, number: int, ids: Ids, left_out: dict[int, SourceError]) -> tuple[int, int]:
        """Write a shard under another name, compare, rename; return its bytes and samples."""
        part, samples = self._target.scratch / f"{_name(number)}.part", 0
        part.unlink(missing_ok=True)
        written: list[tuple[str, int, int]] = []
        with part.open("xb") as file:
            for sample, data, error in self._read(ids):
                if error is None:
                    samples += 1
                    for path, content in self._files(sample, data):
                        written.append((path, len(content), zlib.crc32(content)))
                        _append(file, path, content)
                elif self._leave_out:
                    left_out[sample] = error
                else:
                    raise error
            file.write(_END)
            file.flush()
            os.fsync(file.fileno())
            num_bytes = file.tell()
        self._layouts[number] = self._compare(part, num_bytes, written)
        self._target.take(part, _name(number))
        return num_bytes, samples

    def _read(self, ids: Ids) -> Iterator[tuple[int, memoryview, SourceError | None]]:
        """Yield the samples, the next ones being read meanwhile."""
        sizes = self._source.sizes[ids]
        limits = {"most_bytes": _CHUNK_BYTES, "most_samples": _CHUNK_SAMPLES}
        chunks = list(in_batches(ids, sizes, **limits))
        with ThreadPoolExecutor(1, "stoker-pack") as pool:
            coming = pool.submit(read_whole, self._source, chunks[0])
            for number, chunk in enumerate(chunks):
                data, offsets, errors = coming.result()
                if number + 1 < len(chunks):
                    coming = pool.submit(read_whole, self._source, chunks[number + 1])
                for row, sample in enumerate(chunk.tolist()):
                    yield sample, data.data[offsets[row] : offsets[row + 1]], errors.get(row)
                self._progress(len(chunk), int(self._source.sizes[chunk].sum()))

    def _files(self, sample: int, data: memoryview) -> list[tuple[str, memoryview]]:
        """Return the files of a sample: path in the archive, and content."""
        if isinstance(self._source, ShardSource):
            folder, slash, _ = self._source.key(sample).rpartition("/")
            parts = self._source.parts(sample, data)
            stem = f"{folder}{slash}{sample:09d}"
            return [(f"{stem}.{extension}", content) for extension, content in parts.items()]
        folder = ""
        if isinstance(self._source, ClassFolders):
            folder = f"{self._source.classes[self._source.targets[sample]]}/"
        found = _EXTENSION.search(self._source.name(sample))
        extension = found[1].lower() if found else "bin"
        return [(f"{folder}{sample:09d}.{extension}", data)]

    @staticmethod
    def _compare(part: Path, num_bytes: int, written: list[tuple[str, int, int]]) -> Layout:
        """Read a shard as any reader would; raise SampleCorrupt unless it is what was written."""
        read = reader_of(part)
        layout = _Packer._layout(read, num_bytes)
        for member, (path, size, crc) in zip_longest(
            layout.members, written, fillvalue=("", -1, 0)
        ):
            if (
                isinstance(member, tuple)
                or (member.path, member.size) != (path, size)
                or zlib.crc32(read(member.start, size)) != crc
            ):
                raise SampleCorrupt(f"{path} was not written as it was read: is the disk full?")
        return layout


def _append(file: BinaryIO, path: str, content: memoryview) -> None:
    """Add a file to an archive."""
    header = tarfile.TarInfo(path)
    header.size, header.mode = len(content), 0o644
    file.write(header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
    file.write(content)
    file.write(bytes(-len(content) % _ALIGNED))


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

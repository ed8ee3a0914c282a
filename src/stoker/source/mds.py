"""The samples of MosaicML's MDS shards, as StreamingDataset's writer makes them."""

from __future__ import annotations

import bz2
import functools
import json
import posixpath
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt
from stoker.shared import SharedArray
from stoker.source.arrow import pyarrow
from stoker.source.base import PackedRead, check_ids, without
from stoker.source.file_set import FileSet
from stoker.source.listing import Arrays, kept
from stoker.source.pace import Pace
from stoker.source.packed import Offsets, Packed, gather, offsets_of
from stoker.source.records import RecordSource
from stoker.source.remote.request import Tally
from stoker.source.row_source import KEPT_BYTES, RowSource, Units
from stoker.source.sample_format import (
    Column,
    Field,
    FormattedSource,
    SampleFormat,
    as_field,
    chosen,
)

INDEX = "index.json"
_MOST = 1 << 48  # of samples, or bytes, that a list may speak of
_TEXT = ("str", "str_int", "str_float", "str_decimal", "json")
_NUMBERS = {"int": "int64"} | {
    name: name
    for name in (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
_RECORD = SampleFormat((Field("record", "bytes"),), True)


class MDSSource(FormattedSource):
    """The samples of a folder of MDS shards, in their order.

    Text, numbers and arrays of one shape are as :class:`~stoker.source.sample_format.SampleFormat`
    says; ``bytes``, ``jpeg`` and ``png`` are the bytes of the file. Other encodings stay as MDS has
    them, and nothing is unpickled.

    From plain shards a read fetches the samples it needs. A compressed one is fetched and unpacked
    whole; the last ``kept_bytes`` of such stay in each process that reads. Thread-safe; works in
    children of every start method, also after the parent has read.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        columns: str | Sequence[str] | None = None,
        kept_bytes: int = KEPT_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
        cache_index: bool = True,
    ) -> None:
        """Read ``index.json`` and the heads of the shards.

        ``folder`` is a path or an address, of the folder or of its ``index.json``. ``columns`` is a
        name, or several, by default all. ``kept_bytes`` is in bytes, per process.
        ``storage_options`` and ``pace`` are those of :class:`ObjectSource`. ``cache_index=False``
        neither uses nor keeps an index.

        Raises :class:`ConfigError` for other formats and versions, shards with different columns, a
        column that is not there, and without what unpacks; :class:`SampleCorrupt` for damaged
        files; :class:`SampleNotFound`; :class:`SourceUnavailable`.
        """
        pace = pace or Pace()
        place = str(folder).removesuffix(INDEX).rstrip("/")
        listing = FileSet([f"{place}/{INDEX}"], storage_options, pace)
        shards = _shards(bytes(listing.read(0, 0, listing.size(0))), listing.name(0))
        listing.close()
        shards = [shard for shard in shards if shard.samples]
        if not shards:
            raise ConfigError(f"{listing.name(0)} lists no samples")
        self._layout = shards[0].layout
        names, is_single = chosen(columns, self._layout.names)
        self.format = SampleFormat(tuple(map(self._layout.field, names)), is_single)
        files = FileSet([f"{place}/{shard.file}" for shard in shards], storage_options, pace)
        if shards[0].compression:
            self._records: RecordSource | RowSource = _Zipped(files, shards, kept_bytes)
        else:
            self._records = _Plain(files, shards, cache_index)
        self._fingerprint = f"{self._records.fingerprint}{names}{is_single}"
        self._is_exact = not shards[0].compression and len(names) == len(self._layout.names)
        left_out = sum(size for name, size in self._layout.columns if name not in names)
        more = self.format.overhead - 4 * self._layout.num_variable - left_out
        self._sizes = SharedArray.copy_of(np.maximum(self._records.sizes + more, 0), "sizes")

    @property
    def local_identity(self) -> str:
        """Hash of the shards' change times where they are of this machine, else empty."""
        return self._records.local_identity

    @property
    def breaks(self) -> Offsets:
        """``i64[K]``: the first sample of each shard but the first."""
        return self._records.breaks

    @property
    def is_ready(self) -> bool:
        """Whether this process has its helper already, or needs none."""
        return self._records.is_ready

    @property
    def tally(self) -> Tally:
        """The requests that this process has made so far."""
        return self._records.tally

    def name(self, sample_id: int) -> str:
        """Return the shard's address and the sample in it, like ``s3://b/shard.00000.mds#17``."""
        return self._records.name(sample_id)

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`."""
        self._check_open()
        wanted = check_ids(ids, len(self))
        data, offsets, errors = self._records.read_packed(wanted)
        places, is_whole = self._layout.split(Packed(data, offsets))
        errors = dict(errors)
        for row in np.flatnonzero(~is_whole).tolist():
            if row not in errors:
                sample, length = int(wanted[row]), int(offsets[row + 1] - offsets[row])
                why = f"{self.name(sample)}: its {length} bytes are not those of its values"
                errors[row] = SampleCorrupt(why, [sample])
        rows = np.arange(len(wanted))
        valid = np.ones(len(wanted), np.bool_)
        columns = [
            Column(gather([Packed(data, places[field.name])], np.zeros_like(rows), 2 * rows), valid)
            for field in self.format.fields
        ]
        return without(errors, *self.format.joined(columns))

    def close(self) -> None:
        """Let go of the storage and refuse further reads."""
        super().close()
        self._records.close()


@dataclass(frozen=True)
class _Layout:
    """What a record consists of: ``u32`` lengths of values whose sizes vary, then all values."""

    columns: tuple[tuple[str, int], ...]
    """Name and bytes of each; 0 where the size varies."""
    encodings: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.columns]

    @property
    def num_variable(self) -> int:
        return sum(not size for _, size in self.columns)

    def field(self, name: str) -> Field:
        """Return what samples have of a column."""
        encoding, *how = self.encodings[self.names.index(name)].split(":")
        if encoding in _TEXT:
            return Field(name, "text")
        if encoding in _NUMBERS:
            return as_field(name, np.dtype(_NUMBERS[encoding]), ())
        if encoding == "ndarray" and len(how) == 2 and how[0] in _NUMBERS:
            with suppress(ValueError):
                shape = tuple(int(length) for length in how[1].split(","))
                return as_field(name, np.dtype(how[0]), shape)
        return Field(name, "bytes")

    def split(self, records: Packed) -> tuple[dict[str, Offsets], npt.NDArray[np.bool_]]:
        """Return where values begin and end, i64[2n] by column, and ``bool[n]``: which are whole.

        A value of a record that is not whole begins and ends at 0.
        """
        begins, ends = records.offsets[:-1], records.offsets[1:]
        head = 4 * self.num_variable
        is_whole = ends - begins >= head
        rows = np.flatnonzero(is_whole)
        heads = records.data[begins[rows][:, None] + np.arange(head)].view("<u4")
        varying = iter(heads.T.astype(np.int64))
        sizes = np.zeros((len(self.columns), len(begins)), np.int64)
        for number, (_, size) in enumerate(self.columns):
            sizes[number, rows] = size or next(varying)
        is_whole &= head + sizes.sum(0) == ends - begins
        stops = begins + head + np.cumsum(sizes, axis=0)
        both = np.where(is_whole[:, None], np.stack([stops - sizes, stops], axis=2), 0)
        return {name: both[number].ravel() for number, name in enumerate(self.names)}, is_whole


@dataclass(frozen=True)
class _Shard:
    """What the index says about a shard."""

    file: str
    samples: int
    num_bytes: int
    """When it is plain."""
    compression: str
    """Without a level; empty for a plain shard."""
    layout: _Layout


def _shards(index: bytes, name: str) -> list[_Shard]:
    """Return what ``index.json`` says; errors name it."""
    try:
        about = json.loads(index)
        listed = about["shards"]
        kinds = {(shard["format"], shard["version"]) for shard in listed} - {("mds", 2)}
        if kinds or about["version"] != 2:
            raise ConfigError(f"{name} is of version {about['version']} with shards {kinds}")
        shards = [_shard(shard) for shard in listed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise SampleCorrupt(f"{name} is no index of MDS shards: {error!r}") from error
    if len({(shard.layout, shard.compression) for shard in shards}) > 1:
        raise ConfigError(f"{name} has shards with different columns or compressions")
    return shards


def _shard(about: Mapping[str, Any]) -> _Shard:
    sizes = [size or 0 for size in about["column_sizes"]]
    columns = tuple(zip(map(str, about["column_names"]), sizes, strict=True))
    layout = _Layout(columns, tuple(map(str, about["column_encodings"])))
    if not len(columns) == len(layout.encodings) == len(set(layout.names)):
        raise ValueError(f"columns {layout.names} of {layout.encodings}")
    raw, zipped = about["raw_data"], about["zip_data"]
    file = posixpath.normpath(str((zipped or raw)["basename"]))
    if file.startswith(("/", "..")) or "\0" in file:
        raise ValueError(f"a shard outside of its folder: {file!r}")
    "".join((file, *layout.names, *layout.encodings)).encode()  # JSON has lone surrogates
    numbers = [about["samples"], raw["bytes"], *sizes]
    if not all(type(number) is int and 0 <= number <= _MOST for number in numbers):
        raise ValueError(f"numbers like {numbers}")
    if raw["bytes"] < 4 * (about["samples"] + 2):
        raise ValueError(f"{about['samples']} samples in {raw['bytes']} bytes")
    compression = str(about["compression"]).partition(":")[0] if zipped else ""
    return _Shard(file, about["samples"], raw["bytes"], compression, layout)


class _Plain(RecordSource):
    """The records of plain shards."""

    def __init__(self, files: FileSet, shards: list[_Shard], cache_index: bool) -> None:
        counts = [shard.samples for shard in shards]

        def made() -> Arrays:
            each = files.of_each(lambda file: _heads(files, file, counts[file]))
            return {"bounds": np.concatenate(each)}

        cache = files.index_cache("mds", counts) if cache_index else None
        bounds: Offsets = kept(cache, lambda arrays: arrays["bounds"], made)
        # Each shard has one bound more than samples.
        is_last = np.zeros(len(bounds), np.bool_)
        is_last[np.cumsum(np.array(counts, np.int64) + 1) - 1] = True
        starts, lengths = bounds[~is_last], np.append(np.diff(bounds), 0)[~is_last]
        self._hold(files, counts, starts, lengths, _RECORD, "mds")


def _heads(files: FileSet, file: int, samples: int) -> Offsets:
    """Return where the records of a shard begin, and where the last ends, i64[samples + 1]."""
    size = files.size(file)
    length = min(4 * (samples + 2), size)
    head = np.frombuffer(files.read(file, 0, length), "<u4", length // 4).astype(np.int64)
    return _checked(head, samples, size, files.name(file))


def _checked(head: Offsets, samples: int, size: int, name: str) -> Offsets:
    bounds = head[1:]
    if len(bounds) != samples + 1 or head[0] != samples or bounds[-1] > size:
        raise SampleCorrupt(f"{name} is cut off, or no MDS shard of {samples} samples")
    if (np.diff(bounds) < 0).any():
        raise SampleCorrupt(f"{name}: its samples do not follow one another")
    return bounds


class _Zipped(RowSource):
    """The records of compressed shards, each a unit that is unpacked whole."""

    def __init__(self, files: FileSet, shards: list[_Shard], kept_bytes: int) -> None:
        self._unpack = _unpacker(shards[0].compression)
        self._names = [files.name(file) for file in range(len(files))]
        samples = np.array([shard.samples for shard in shards], np.int64)
        units = Units(
            first_rows=offsets_of(samples)[:-1],
            of_column=np.array([0, len(shards)]),
            ranges=np.arange(len(shards) + 1),
            files=np.arange(len(shards), dtype=np.uint32),
            starts=np.zeros(len(shards), np.int64),
            lengths=files.keys.sizes.copy(),
            notes=np.array([shard.num_bytes for shard in shards], np.int64),
            value_bytes=np.array([shard.num_bytes / shard.samples for shard in shards]),
        )
        self._hold(files, _RECORD, int(samples.sum()), units, kept_bytes, "mds")

    def _decoded(self, unit: int, num_rows: int, pieces: list[memoryview]) -> Column:
        """Return the records of a shard; raises an exception of any kind for a damaged one."""
        raw = np.frombuffer(self._unpack(pieces[0], int(self._units.notes[unit])), np.uint8)
        head = raw[: 4 * (num_rows + 2)]
        bounds = _checked(head.view("<u4").astype(np.int64), num_rows, len(raw), self._names[unit])
        records = Packed(raw[bounds[0] : bounds[-1]], bounds - bounds[0])
        return Column(records, np.ones(num_rows, np.bool_))


def _unpacker(compression: str) -> Callable[[memoryview, int], bytes]:
    """Return what unpacks a shard into so many bytes; ConfigError where there is none."""
    known = {"gz": _gunzip, "bz2": _bunzip2}
    if compression in known:
        return known[compression]
    codec = {"zstd": "zstd", "br": "brotli", "snappy": "snappy"}.get(compression)
    if codec is None:
        raise ConfigError(f"shards are compressed by {compression!r}, which is not known")
    pyarrow()
    return functools.partial(_by_arrow, codec)


def _gunzip(data: memoryview, num_bytes: int) -> bytes:
    return zlib.decompressobj(31).decompress(data, num_bytes + 1)


def _bunzip2(data: memoryview, num_bytes: int) -> bytes:
    return bz2.BZ2Decompressor().decompress(data, num_bytes + 1)


def _by_arrow(codec: str, data: memoryview, num_bytes: int) -> bytes:
    pa = pyarrow()
    unpacked: bytes = pa.Codec(codec).decompress(pa.py_buffer(data), num_bytes, asbytes=True)
    return unpacked

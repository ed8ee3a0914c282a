"""Samples that are ranges of files: TFRecords, rows of NumPy's files and of raw numbers."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt
from stoker.shared import SharedArray
from stoker.source.base import Errors, PackedRead, check_ids, without
from stoker.source.file_set import FileSet, FileSetSource, Places
from stoker.source.listing import Arrays, kept
from stoker.source.pace import Pace
from stoker.source.packed import Offsets, offsets_of
from stoker.source.sample_format import Field, FormattedSource, SampleFormat, as_field

_MOST = 1 << 32
TFRECORD_ENDINGS = (".tfrecord", ".tfrecords")
NUMPY_ENDINGS = (".npy",)
_HEAD = struct.Struct("<QI")  # bytes of the record, and a checksum of that
_TAIL = 4  # bytes of the record's checksum
_WINDOW = 4 << 20
_COMPRESSED = (b"\x1f\x8b", b"\x78\x9c", b"\x78\x01", b"\x78\xda")
_HEADER = 4096  # bytes; NumPy's own are shorter but for types of many fields


class RecordSource(FormattedSource, FileSetSource):
    """Records of files as samples; a subclass finds where they lie.

    Records of one file that lie close together are read by one request. The index takes 20 bytes a
    sample, in shared memory. Thread-safe; works in children of every start method, also after the
    parent has read.
    """

    _is_exact = True

    def _hold(
        self,
        files: FileSet,
        counts: list[int],
        starts: Offsets,
        lengths: Offsets,
        sample_format: SampleFormat,
        about: str = "",
    ) -> None:
        """Keep where the records lie: so many of each file, one file after the other."""
        if not 0 < len(starts) < _MOST:
            raise ConfigError(f"there are {len(starts)} samples: a source has 1 to {_MOST - 1}")
        self._files, self.format = files, sample_format
        self._first = offsets_of(np.array(counts, np.int64))
        self._starts = SharedArray.copy_of(starts, "starts")
        self._sizes = SharedArray.copy_of(lengths, "lengths")
        self._fingerprint = f"{files.keys.fingerprint}-{about}"

    def name(self, sample_id: int) -> str:
        """Return the file's address and the record in it, like ``s3://b/000.tfrecord#17``."""
        file = self._file_of(np.array([sample_id]))[0]
        return f"{self._files.name(int(file))}#{sample_id - self._first[file]}"

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`.

        Raises :class:`ConfigError` also for refused credentials, as :class:`KeySource` does.
        """
        self._check_open()
        wanted = check_ids(ids, len(self))
        files = self._file_of(wanted)
        starts, lengths = self._starts.array[wanted], self._sizes.array[wanted]
        data, failures = self._files.fetch_near(files, starts, lengths)
        errors: Errors = {
            row: self._files.error(int(files[row]), failure, [int(wanted[row])])
            for row, failure in failures.items()
        }
        return without(errors, data, offsets_of(lengths))


class TFRecordSource(RecordSource):
    """The records of TFRecord files: a sample is the bytes of one, such as a ``tf.train.Example``.

    Where records lie is found in one pass over each file, many at once: small ones are read along,
    large ones are skipped. It is kept with the listings on local disk, and used as long as name,
    size and version of all files are the same. Checksums are not compared. For the rest see
    :class:`RecordSource`.
    """

    def __init__(
        self,
        files: Places,
        *,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
        cache_index: bool = True,
    ) -> None:
        """Find the records, or take that from the disk.

        ``files`` are paths, folders or addresses of one bucket or host, with braces and ``*``.
        ``storage_options`` and ``pace`` are those of :class:`ObjectSource`. ``cache_index=False``
        neither uses nor keeps an index.

        Raises :class:`ConfigError` for compressed files and no records; :class:`SampleCorrupt` for
        files that are cut off or none of TFRecords; :class:`SampleNotFound`;
        :class:`SourceUnavailable`.
        """
        found = FileSet.found(files, TFRECORD_ENDINGS, storage_options, pace)

        def made() -> Arrays:
            each = found.of_each(lambda file: _records(found, file))
            return {
                "counts": np.array([len(starts) for starts, _ in each], np.int64),
                "starts": np.concatenate([starts for starts, _ in each]),
                "lengths": np.concatenate([lengths for _, lengths in each]),
            }

        cache = found.index_cache("tfrecord") if cache_index else None
        counts, starts, lengths = kept(cache, _three, made)
        record = SampleFormat((Field("record", "bytes"),), True)
        self._hold(found, counts.tolist(), starts, lengths, record)


def _three(arrays: Arrays) -> tuple[Offsets, Offsets, Offsets]:
    return arrays["counts"], arrays["starts"], arrays["lengths"]


def _records(files: FileSet, file: int) -> tuple[Offsets, Offsets]:
    """Return where the data of each record begin, and their lengths; errors name the file."""
    size, name = files.size(file), files.name(file)
    starts: list[int] = []
    lengths: list[int] = []
    window, begin, at = memoryview(b""), 0, 0
    while at < size:
        if at + _HEAD.size > begin + len(window):
            window, begin = files.read(file, at, min(_WINDOW, size - at)), at
            if not at and bytes(window[:2]) in _COMPRESSED:
                raise ConfigError(f"{name} is compressed, so records cannot be read one by one")
        if at + _HEAD.size > size:
            raise SampleCorrupt(f"{name} is cut off at byte {at}")
        length, _ = _HEAD.unpack_from(window, at - begin)
        end = at + _HEAD.size + length + _TAIL
        if end > size:
            raise SampleCorrupt(
                f"{name}: a record of {length} bytes at byte {at} does not fit into {size} bytes: "
                "the file is cut off, or has no TFRecords"
            )
        starts.append(at + _HEAD.size)
        lengths.append(length)
        at = end
    return np.array(starts, np.int64), np.array(lengths, np.int64)


class NumpySource(RecordSource):
    """Rows along the first axis of ``.npy`` files, or of raw files of one type of number.

    A sample is the bytes of a row, and ``decode`` makes an array of it, or a number where rows have
    no axes. Several files have rows of one shape and type. For the rest see :class:`RecordSource`.
    """

    def __init__(
        self,
        files: Places,
        *,
        dtype: npt.DTypeLike | None = None,
        shape: tuple[int, ...] = (),
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Read the headers.

        ``files`` are paths, folders or addresses of one bucket or host, with braces and ``*``.
        Files without a header need ``dtype`` and the ``shape`` of a row, such as ``(1024,)`` for
        windows of 1,024 tokens; numbers after the last whole row are left out. ``storage_options``
        and ``pace`` are those of :class:`ObjectSource`.

        Raises :class:`ConfigError` for rows of different kinds, big-endian numbers, Fortran order,
        objects, and no rows; :class:`SampleCorrupt` for damaged files; :class:`SampleNotFound`;
        :class:`SourceUnavailable`.
        """
        found = FileSet.found(files, NUMPY_ENDINGS, storage_options, pace)
        if dtype is None:
            heads = found.of_each(lambda file: _header(found, file))
        else:
            raw = np.dtype(dtype)
            row_bytes = raw.itemsize * int(np.prod(shape))
            if row_bytes < 1 or min(shape, default=1) < 1:
                raise ConfigError(f"dtype={raw}, shape={shape}: a row has to have numbers")
            sizes = found.keys.sizes.tolist()
            heads = [(0, (size // row_bytes, *shape), raw) for size in sizes]
        kinds = {(rows[1:], kind) for _, rows, kind in heads}
        if len(kinds) > 1:
            raise ConfigError(f"the files have rows of different shapes or types: {kinds}")
        ((row, kind),) = kinds
        if kind.byteorder == ">":
            raise ConfigError(f"numbers of type {kind} are big-endian: write them little-endian")
        field = as_field("row", kind, row)
        row_bytes = kind.itemsize * int(np.prod(row))
        counts = [rows[0] for _, rows, _ in heads]
        starts = [
            begin + row_bytes * np.arange(rows[0], dtype=np.int64) for begin, rows, _ in heads
        ]
        lengths = np.full(sum(counts), row_bytes, np.int64)
        about = f"{kind.str}{row}"
        self._hold(
            found, counts, np.concatenate(starts), lengths, SampleFormat((field,), True), about
        )


def _header(files: FileSet, file: int) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Return where the data of an ``.npy`` file begin, their shape and type; errors name it."""
    name, size = files.name(file), files.size(file)
    head = io.BytesIO(files.read(file, 0, min(size, _HEADER)))
    try:
        version = np.lib.format.read_magic(head)
        is_old = version == (1, 0)
        read = (
            np.lib.format.read_array_header_1_0 if is_old else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran, dtype = read(head)
        shape = tuple(map(int, shape))
    except Exception as error:  # NumPy raises what it likes
        raise SampleCorrupt(
            f"{name} has no header of NumPy ({error}): give dtype= and shape= for raw numbers"
        ) from error
    if not shape or (is_fortran and len(shape) > 1):
        raise ConfigError(f"{name} has shape {shape} in {'FC'[not is_fortran]} order: no rows")
    if dtype.hasobject or min(shape[1:], default=1) < 1:
        raise ConfigError(f"{name} has rows of {dtype} {shape[1:]}, which have no fixed bytes")
    num_bytes = dtype.itemsize * int(np.prod(shape, dtype=object))
    if not 0 <= num_bytes <= size - head.tell():
        raise SampleCorrupt(f"{name} is cut off: it has {size} bytes for {shape} of {dtype}")
    return head.tell(), shape, dtype

"""The records of TFRecord files."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source.file_set import AT_ONCE, FileSet
from stoker.source.listing_cache import Arrays
from stoker.source.pace import Pace
from stoker.source.packed import Offsets
from stoker.source.patterns import Places, find_files
from stoker.source.records import RecordSource
from stoker.source.sample_format import Field, SampleFormat

ENDINGS = (".tfrecord", ".tfrecords")
_HEAD = struct.Struct("<QI")  # bytes of the record, and a checksum of that
_TAIL = 4  # bytes of the record's checksum
_WINDOW = 4 << 20
_COMPRESSED = (b"\x1f\x8b", b"\x78\x9c", b"\x78\x01", b"\x78\xda")


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
        pace = pace or Pace()
        found = FileSet(find_files(files, ENDINGS, storage_options, pace), storage_options, pace)
        cache = found.index_cache("tfrecord") if cache_index else None
        index = None if cache is None else cache.load(_three)
        if index is None:
            with ThreadPoolExecutor(AT_ONCE, "stoker-index") as pool:
                each = list(pool.map(lambda file: _records(found, file), range(len(found))))
            index = (
                np.array([len(starts) for starts, _ in each], np.int64),
                np.concatenate([starts for starts, _ in each]),
                np.concatenate([lengths for _, lengths in each]),
            )
            if cache is not None:
                cache.store(dict(zip(("counts", "starts", "lengths"), index, strict=True)))
        counts, starts, lengths = index
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

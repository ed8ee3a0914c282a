"""The rows of NumPy's files, and of files of numbers without a header: tokens, embeddings."""

from __future__ import annotations

import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source.file_set import AT_ONCE, FileSet
from stoker.source.pace import Pace
from stoker.source.patterns import Places, find_files
from stoker.source.records import RecordSource
from stoker.source.sample_format import SampleFormat, as_field

ENDINGS = (".npy",)
MAGIC = b"\x93NUMPY"
_HEADER = 4096  # bytes; NumPy's own are shorter but for types of many fields


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
        pace = pace or Pace()
        found = FileSet(find_files(files, ENDINGS, storage_options, pace), storage_options, pace)
        if dtype is None:
            with ThreadPoolExecutor(AT_ONCE, "stoker-index") as pool:
                heads = list(pool.map(lambda file: _header(found, file), range(len(found))))
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

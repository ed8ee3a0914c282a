"""Rows along the first axis of arrays that a library reads, h5py or zarr."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SourceError
from stoker.shared import SharedArray
from stoker.source.base import Errors, PackedRead, check_ids, without
from stoker.source.files import list_paths
from stoker.source.held import OwnHandle
from stoker.source.packed import Packed, gather, offsets_of, pack
from stoker.source.row_source import KEPT_BYTES, KeptUnits
from stoker.source.sample_format import (
    Column,
    Field,
    FormattedSource,
    SampleFormat,
    as_field,
    chosen,
)

_THREADS = 16
_ONLY = "array"  # what the only array of a store is called


class ArrayRowSource(FormattedSource):
    """Rows of several arrays of one length, which are the columns of a sample.

    A chunk of rows is read whole, and the last ``kept_bytes`` of such stay in each process that
    reads; where an array has no chunks, neighbours are read together. Threads take turns, since the
    libraries have locks of their own. Works in children of every start method, also after the
    parent has read.
    """

    def _hold(
        self,
        path: Path,
        make: Callable[[str], Any],
        columns: str | Sequence[str] | None,
        kept_bytes: int,
    ) -> None:
        """Open the arrays: ``make(path)`` has ``names()``, ``array(name)`` and ``close()``."""
        self._kept = KeptUnits(kept_bytes)
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
        if not files:
            raise ConfigError(f"path={str(path)!r}: there is nothing to read")
        listing = list_paths(files, _THREADS)
        self._path, self._local_identity = str(path), listing.local_identity
        self._handle = OwnHandle(functools.partial(make, str(path)), _close)
        with self._handle.use() as opened:
            names, is_single = chosen(columns, opened.names())
            arrays = [opened.array(name) for name in names]
            num_rows = _length(str(path), names, arrays)
            fields = [opened.field(name) for name in names]
            self._chunks = [_chunk_rows(array) for array in arrays]
            sizes = sum(
                _row_bytes(field, array) for field, array in zip(fields, arrays, strict=True)
            )
        self.format = SampleFormat(tuple(fields), is_single)
        self._is_exact = all(field.shape is not None or field.kind == "number" for field in fields)
        all_same = np.full(num_rows, sizes + self.format.overhead, np.int64)
        self._sizes = SharedArray.copy_of(all_same, "sizes")
        self._fingerprint = f"{listing.fingerprint}-{names}{is_single}"

    def name(self, sample_id: int) -> str:
        """Return the path and the row."""
        return f"{self._path}#{sample_id}"

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; see :meth:`Source.read_packed`."""
        wanted = check_ids(ids, len(self))
        errors: Errors = {}
        with self._handle.use() as opened:
            columns = [
                self._column(opened, number, wanted, errors)
                for number in range(len(self.format.fields))
            ]
        return without(errors, *self.format.joined(columns))

    def _column(
        self, opened: Any, number: int, rows: npt.NDArray[np.uint32], errors: Errors
    ) -> Column:
        """Return the values of a column at these rows; adds to ``errors`` by position."""
        field, size = self.format.fields[number], self._chunks[number]
        bounds = _runs(rows) if size == 0 else _chunks(rows, size, len(self))
        begins = bounds[:, 0]
        part = np.searchsorted(begins, rows, "right") - 1
        parts: list[Packed] = []
        for place, (begin, end) in enumerate(bounds.tolist()):
            unit = (number << 40) + begin
            kept = self._kept.get(unit) if size else None
            if kept is None:
                try:
                    values = opened.array(field.name)[begin:end]
                    packed = _packed(field, values)
                except Exception as error:  # the libraries raise what they like
                    for row in np.flatnonzero(part == place).tolist():
                        errors.setdefault(row, self._error(int(rows[row]), error))
                    packed = Packed(np.empty(0, np.uint8), np.zeros(end - begin + 1, np.int64))
                else:
                    kept = Column(packed, np.ones(end - begin, np.bool_))
                    if size:
                        self._kept.put(unit, kept)
            parts.append(packed if kept is None else kept.packed)
        index = rows.astype(np.int64) - begins[part] if len(rows) else np.empty(0, np.int64)
        return Column(gather(parts, part, index), np.ones(len(rows), np.bool_))

    def _error(self, row: int, error: Exception) -> SourceError:
        return SampleCorrupt(f"{self.name(row)} cannot be read: {error}", [row])

    def close(self) -> None:
        """Close the file in this process and refuse further reads."""
        self._handle.close()
        self._kept = KeptUnits(0)


class HDF5Source(ArrayRowSource):
    """Rows along the first axis of the data sets of a local HDF5 file, read by h5py.

    Columns are the paths of data sets, like ``"images"`` or ``"train/labels"``. Texts and bytes of
    variable length are as they are, and so are lists of numbers of variable length, as bytes. For
    the rest see :class:`ArrayRowSource`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: str | Sequence[str] | None = None,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Open the file.

        ``columns`` is a name, or several, by default all data sets. ``kept_bytes`` is in bytes.

        Raises :class:`ConfigError` without h5py, for a file that is not there or none of HDF5, a
        column that is not there, and columns of different lengths or without rows.
        """
        self._hold(Path(path).absolute(), _HDF5, columns, kept_bytes)


class ZarrSource(ArrayRowSource):
    """Rows along the first axis of the arrays of a local Zarr store, of version 2 or 3.

    Columns are the paths of arrays; the array of a store that is one itself is ``"array"``. For the
    rest see :class:`ArrayRowSource`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: str | Sequence[str] | None = None,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Open the store.

        ``columns`` is a name, or several, by default all arrays. ``kept_bytes`` is in bytes.

        Raises :class:`ConfigError` without zarr, for a folder that is no store, a column that is
        not there, and columns of different lengths or without rows.
        """
        self._hold(Path(path).absolute(), _Zarr, columns, kept_bytes)


def _numbers_or_text(name: str, array: Any, text: str | None) -> Field:
    """Return the field of an array's rows; ``text`` is the kind of those of variable length."""
    if text is None:
        return as_field(name, np.dtype(array.dtype), tuple(map(int, array.shape[1:])))
    if array.ndim != 1:
        raise ConfigError(f"{name!r} has several texts in a row, which is not supported")
    return Field(name, "text" if text == "text" else "bytes")


def _close(opened: Any) -> None:
    opened.close()


def _length(path: str, names: Sequence[str], arrays: Sequence[Any]) -> int:
    """Return the rows of all arrays; raises ConfigError where they differ, or there are none."""
    lengths = {
        name: int(a.shape[0]) if a.ndim else 0 for name, a in zip(names, arrays, strict=True)
    }
    if len(set(lengths.values())) > 1 or not min(lengths.values()):
        raise ConfigError(f"{path} has arrays of {lengths} rows: choose columns of one length")
    return next(iter(lengths.values()))


def _chunk_rows(array: Any) -> int:
    chunks = array.chunks
    return int(chunks[0]) if chunks else 0


def _row_bytes(field: Field, array: Any) -> int:
    if field.kind in ("number", "array"):
        return int(np.dtype(field.dtype).itemsize * np.prod(field.shape or ()))
    some = _packed(field, array[: min(32, array.shape[0])])
    return int(np.ceil(len(some.data) / (len(some.offsets) - 1)))


def _packed(field: Field, values: npt.NDArray[Any]) -> Packed:
    """Return the rows ``[n, ...]`` as bytes."""
    if field.kind in ("number", "array"):
        flat = np.ascontiguousarray(values, field.dtype)
        row = flat.itemsize * int(np.prod(flat.shape[1:]))
        sizes = np.full(len(flat), row, np.int64)
        return Packed(flat.reshape(-1).view(np.uint8), offsets_of(sizes))
    return Packed(*pack([_as_bytes(value) for value in values.tolist()]))


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes()


def _runs(rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Return [begin, end) of the runs of neighbours among the rows, i64[r, 2]."""
    own = np.unique(rows).astype(np.int64)
    breaks = np.flatnonzero(np.diff(own) > 1)
    begins = own[np.concatenate([[0], breaks + 1]).astype(np.int64)] if len(own) else own
    ends = own[np.concatenate([breaks, [len(own) - 1]]).astype(np.int64)] + 1 if len(own) else own
    return np.stack([begins, ends], 1)


def _chunks(rows: npt.NDArray[np.uint32], size: int, length: int) -> npt.NDArray[np.int64]:
    """Return [begin, end) of the chunks that have the rows, i64[r, 2]."""
    begins = np.unique(rows.astype(np.int64) // size) * size
    return np.stack([begins, np.minimum(begins + size, length)], 1)


class _HDF5:
    """An open file."""

    def __init__(self, path: str) -> None:
        try:
            import h5py
        except ImportError as error:
            raise ConfigError("h5py is not installed: run pip install 'stoker[hdf5]'") from error
        self._h5py = h5py
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise ConfigError(f"{path} is no file of HDF5 that can be read: {error}") from error

    def names(self) -> list[str]:
        """Return the paths of all data sets, in the order of their names."""
        found: list[str] = []

        def note(name: str, item: Any) -> None:
            if isinstance(item, self._h5py.Dataset):
                found.append(name)

        self._file.visititems(note)
        return found

    def array(self, name: str) -> Any:
        """Return a data set."""
        return self._file[name]

    def field(self, name: str) -> Field:
        """Return what samples have of it."""
        array = self._file[name]
        text = self._h5py.check_string_dtype(array.dtype)
        of_lists = self._h5py.check_vlen_dtype(array.dtype)
        kind = None
        if text is not None:
            kind = "text" if text.encoding == "utf-8" else "bytes"
        elif of_lists is not None and np.dtype(of_lists).kind in "biuf":
            kind = "bytes"
        return _numbers_or_text(name, array, kind)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Zarr:
    """An open store."""

    def __init__(self, path: str) -> None:
        try:
            import zarr
        except ImportError as error:
            raise ConfigError("zarr is not installed: run pip install 'stoker[zarr]'") from error
        try:
            opened: Any = zarr.open(path, mode="r")
            if isinstance(opened, zarr.Array):
                self._arrays = {_ONLY: opened}
            else:
                members = opened.members(max_depth=None)
                self._arrays = {n: item for n, item in members if isinstance(item, zarr.Array)}
        except Exception as error:  # zarr raises what it likes
            raise ConfigError(f"{path} is no store of Zarr that can be read: {error}") from error

    def names(self) -> list[str]:
        """Return the paths of all arrays, sorted."""
        return sorted(self._arrays)

    def array(self, name: str) -> Any:
        """Return an array."""
        return self._arrays[name]

    def field(self, name: str) -> Field:
        """Return what samples have of it."""
        array = self._arrays[name]
        kind = {"T": "text", "O": "bytes"}.get(array.dtype.kind)
        return _numbers_or_text(name, array, kind)

    def close(self) -> None:
        """Let go of the store, which holds nothing open."""
        self._arrays = {}

"""What the bytes of a sample are where samples are rows of columns, and how they are decoded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source.held import HeldSource
from stoker.source.packed import (
    HEADER,
    Buffer,
    Bytes,
    Offsets,
    Packed,
    offsets_of,
    part_header,
    split_parts,
)

Kind = Literal["bytes", "text", "number", "array", "arrow"]


@dataclass(frozen=True)
class Field:
    """One column: what its values are, and thereby what their bytes are."""

    name: str
    kind: Kind
    """``"bytes"``: as they are; ``"text"``: UTF-8; ``"number"`` and ``"array"``: ``dtype``'s bytes
    in C order; ``"arrow"``: an Arrow record batch of one row and one column, without its schema."""
    dtype: str = ""
    """NumPy's, little-endian."""
    shape: tuple[int, ...] | None = None
    """Of an array; None for one axis of any length."""
    schema: bytes = b""
    """Arrow's, for ``"arrow"``."""

    @property
    def may_be_empty(self) -> bool:
        """Whether a value can have no bytes; else none are null."""
        return self.kind in ("bytes", "text") or (self.kind == "array" and not self.shape)

    def decode(self, data: Buffer) -> Any:
        """Return the value; raises an exception of any kind for other bytes."""
        if self.kind == "bytes":
            return bytes(data)
        if self.kind == "text":
            return str(data, "utf-8")
        if self.kind == "arrow":
            return _arrow_value(self.schema, data)
        values = np.frombuffer(data, self.dtype)
        if self.kind == "array":
            return values.reshape(-1 if self.shape is None else self.shape).copy()
        (number,) = values
        return number if values.dtype.kind in "mM" else number.item()


@dataclass(frozen=True)
class SampleFormat:
    """The columns of a sample. Immutable, pickles.

    With one column, a sample is that value's bytes, and none where the value is null. With several
    it is a part for each (:func:`~stoker.source.split_parts`) that is not null, called like the
    column. Both are the same for the same row, whichever format the file has.
    """

    fields: tuple[Field, ...]
    is_single: bool
    """Whether one column was asked for."""

    def decode(self, data: Buffer) -> Any:
        """Return the value, or a dictionary of the values by column; None for null.

        Bytes, text, numbers, times of NumPy, arrays that may be written to, and what Arrow makes of
        nested types. A single null that was bytes or text is empty. Raises
        :class:`SampleCorrupt` for bytes that are no such sample.
        """
        if self.is_single:
            (field,) = self.fields
            return None if not len(data) and not field.may_be_empty else _value(field, data)
        parts = split_parts(data)
        return {
            field.name: _value(field, parts[field.name]) if field.name in parts else None
            for field in self.fields
        }

    def joined(self, columns: Sequence[Column]) -> tuple[Bytes, Offsets]:
        """Return the samples ``u8[total]``, ``i64[n + 1]`` of ``n`` rows, given by column."""
        if self.is_single:
            return columns[0].packed
        lengths = np.stack([np.diff(column.packed.offsets) for column in columns])
        heads = [HEADER.size + len(field.name.encode()) for field in self.fields]
        present = np.stack([column.valid for column in columns])
        offsets = offsets_of(((lengths + np.array(heads)[:, None]) * present).sum(0))
        data = np.empty(offsets[-1], np.uint8)
        into, at = data.data, offsets[:-1].copy()
        for field, column in zip(self.fields, columns, strict=True):
            source, bounds = column.packed.data.data, column.packed.offsets.tolist()
            for row in np.flatnonzero(column.valid).tolist():
                begin, size = int(at[row]), bounds[row + 1] - bounds[row]
                head = part_header(field.name, size)
                into[begin : begin + len(head)] = head
                begin += len(head)
                into[begin : begin + size] = source[bounds[row] : bounds[row + 1]]
                at[row] = begin + size
        return data, offsets

    @property
    def overhead(self) -> int:
        """Bytes of a sample beside its values, with none of them null."""
        if self.is_single:
            return 0
        return sum(HEADER.size + len(field.name.encode()) for field in self.fields)


@dataclass(frozen=True, eq=False)
class Column:
    """The values of ``n`` rows as bytes."""

    packed: Packed
    valid: npt.NDArray[np.bool_]
    """False where the value is null, ``bool[n]``; its bytes are none."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.packed.data.nbytes + self.packed.offsets.nbytes + self.valid.nbytes


NO_VALUE = Column(Packed(np.empty(0, np.uint8), np.zeros(2, np.int64)), np.zeros(1, np.bool_))
"""A row that is null."""


class FormattedSource(HeldSource):
    """A source whose samples are rows, of one or several columns.

    Sizes are estimates unless a subclass knows better: a row's own is known when it is read.
    """

    format: SampleFormat
    """What the bytes of a sample are; ``format.decode`` takes them apart."""
    _is_exact = False

    @property
    def sizes_are_exact(self) -> bool:
        """Whether all sizes are those of the samples; else they are estimates."""
        return self._is_exact

    @property
    def decode(self) -> Callable[[bytes], Any]:
        """What makes a value, or a dictionary of values by column, of a sample's bytes."""
        return self.format.decode

    def values(self) -> npt.NDArray[Any]:
        """Return all values of a source of one column of numbers, ``[N, ...]``: targets, say.

        Raises :class:`ConfigError` for another column, several or nulls, and what a read does.
        """
        data, offsets, errors = self.read_packed(np.arange(len(self)))
        if errors:
            raise errors[min(errors)]
        if not self.format.is_single:
            raise ConfigError("values() is for a source of one column: open it with columns='name'")
        return values_of(Packed(data, offsets), self.format.fields[0])


def chosen(columns: str | Sequence[str] | None, known: Sequence[str]) -> tuple[list[str], bool]:
    """Return the names of the columns asked for (None: all), and whether it is a single one.

    Raises :class:`ConfigError` for names that are not ``known``, none, and one given twice.
    """
    is_single = isinstance(columns, str)
    wanted = [columns] if isinstance(columns, str) else list(known if columns is None else columns)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise ConfigError(
            f"columns={columns!r}: give one or more of {', '.join(map(repr, known))}, each once"
        )
    return wanted, is_single or (columns is None and len(wanted) == 1)


def as_field(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Field:
    """Return the field of rows of ``shape`` in a NumPy array of ``dtype``.

    Raises :class:`ConfigError` for arrays of objects and the like.
    """
    if dtype.kind not in "biufcmM":
        raise ConfigError(f"{name!r} is of type {dtype}, which has no fixed bytes: choose others")
    plain = dtype.newbyteorder("<").str
    return Field(name, "array", plain, shape) if shape else Field(name, "number", plain)


def _value(field: Field, data: Buffer) -> Any:
    try:
        return field.decode(data)
    except Exception as error:  # NumPy and Arrow raise what they like
        raise SampleCorrupt(
            f"{len(data)} bytes are no value of column {field.name!r}: {error}"
        ) from error


@functools.lru_cache(64)
def _arrow_schema(schema: bytes) -> Any:
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(schema))


def _arrow_value(schema: bytes, data: Buffer) -> Any:
    import pyarrow as pa

    batch = pa.ipc.read_record_batch(pa.py_buffer(data), _arrow_schema(schema))
    batch.validate(full=True)
    return batch.column(0)[0].as_py()


def values_of(samples: Packed, field: Field) -> npt.NDArray[Any]:
    """Return the values of a column of numbers as ``[n]``, or of arrays of one shape.

    Raises :class:`ConfigError` for a column of another kind, or with nulls.
    """
    num_rows = len(samples.offsets) - 1
    if field.kind == "number" or (field.kind == "array" and field.shape is not None):
        shape = (num_rows, *(field.shape or ()))
        dtype = np.dtype(field.dtype)
        if len(samples.data) == int(np.prod(shape)) * dtype.itemsize:
            return np.frombuffer(samples.data, dtype).reshape(shape)
        raise ConfigError(f"column {field.name!r} has nulls, so it makes no array")
    raise ConfigError(f"column {field.name!r} holds {field.kind}, not numbers: read its samples")

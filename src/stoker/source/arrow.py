"""Arrow's columns as the bytes of samples; the rows of its files, read a record batch at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source.file_set import FileSet, Places
from stoker.source.pace import Pace
from stoker.source.packed import Packed, offsets_of, pack
from stoker.source.row_source import KEPT_BYTES, RowSource, Units
from stoker.source.sample_format import Column, Field, SampleFormat, chosen

ENDINGS = (".arrow", ".feather", ".ipc")
MAGIC = b"ARROW1"
_CONTINUES = b"\xff\xff\xff\xff"  # precedes the length of each message's metadata
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # types of messages
_LARGEST_HEAD = 256 << 20


class ArrowSource(RowSource):
    """The rows of Arrow files, in the order of the files and of the rows in them.

    IPC files, streams (as the package ``datasets`` keeps them) and Feather files of version 2, with
    or without compression. :class:`~stoker.source.sample_format.SampleFormat` says what the bytes
    of a sample are.

    A read fetches the record batches that hold its rows, and decodes the columns asked for. Columns
    decoded last are kept, ``kept_bytes`` of them in each process that reads; so files of many rows
    in a batch are slow at random. For the rest see :class:`RowSource`.
    """

    def __init__(
        self,
        files: Places,
        *,
        columns: str | Sequence[str] | None = None,
        kept_bytes: int = KEPT_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Find the record batches, one small read for each.

        ``files`` are paths, folders or addresses of one bucket or host, with braces and ``*``.
        ``columns`` is a name, or several, by default all. ``kept_bytes`` is in bytes.
        ``storage_options`` and ``pace`` are those of :class:`ObjectSource`.

        Raises :class:`ConfigError` without pyarrow, for no files or rows, a column that is not
        there, schemas that differ, and Feather of version 1; :class:`SampleCorrupt` for damaged
        files; :class:`SampleNotFound`; :class:`SourceUnavailable`.
        """
        pyarrow()
        found = FileSet.found(files, ENDINGS, storage_options, pace)
        self._opened = found.of_each(lambda file: _opened(found, file))
        schema = self._opened[0].schema
        for number, opened in enumerate(self._opened):
            if not opened.schema.equals(schema):
                raise ConfigError(
                    f"{found.name(number)} has another schema than {found.name(0)}: open files of "
                    "one schema"
                )
        names, is_single = chosen(columns, schema.names)
        self._numbers = [schema.get_field_index(name) for name in names]
        fields = tuple(field_of(schema.field(name)) for name in names)
        units = _units(self._opened, len(names))
        num_rows = sum(batch.num_rows for opened in self._opened for batch in opened.batches)
        about = f"{names}{is_single}"
        self._hold(found, SampleFormat(fields, is_single), num_rows, units, kept_bytes, about)

    def _decoded(self, unit: int, num_rows: int, pieces: list[memoryview]) -> Column:
        """Return the values of a column of a batch; raises an exception of any kind."""
        pa, units = pyarrow(), self._units
        column = units.column_of(unit)
        before = self._opened[int(units.files[units.ranges[unit]])].before
        stream = pa.BufferReader(b"".join([before, *pieces]))
        options = pa.ipc.IpcReadOptions(included_fields=[self._numbers[column]], use_threads=False)
        batch = pa.ipc.open_stream(stream, options=options).read_next_batch()
        batch.validate(full=True)
        return column_of(batch.column(0), self.format.fields[column])


class _Batch(NamedTuple):
    start: int
    length: int
    num_rows: int


@dataclass(frozen=True)
class _Opened:
    """What is needed of a file."""

    schema: Any
    before: bytes
    """The messages that a batch needs before it in a stream: the schema, dictionaries."""
    batches: list[_Batch]


def _opened(files: FileSet, file: int) -> _Opened:
    """Return what a file consists of; errors name it."""
    with files.named(file):
        return _walked(lambda *where: files.read(file, *where), files.size(file))


def _walked(read: Callable[[int, int], memoryview], size: int) -> _Opened:
    """Return the schema and the batches of a file, which follow one another as in a stream."""
    pa = pyarrow()
    begin = bytes(read(0, min(8, size)))
    if begin[:4] == b"FEA1":
        raise ConfigError("it is a Feather file of version 1: write it again")
    at = 8 if begin.startswith(MAGIC) else 0
    schema, before, batches = None, b"", []
    while at + 8 <= size:
        mark, head_bytes = struct.unpack("<4si", read(at, 8))
        if mark != _CONTINUES or not 0 <= head_bytes <= min(_LARGEST_HEAD, size - at - 8):
            raise SampleCorrupt(f"there is no message of Arrow at byte {at}")
        if head_bytes == 0:
            break
        kind, num_rows, body_bytes = _message(read(at + 8, head_bytes))
        whole = 8 + head_bytes + body_bytes
        if body_bytes < 0 or at + whole > size:
            raise SampleCorrupt(f"the message at byte {at} is cut off")
        if kind == _BATCH and num_rows > 0:
            batches.append(_Batch(at, whole, num_rows))
        elif kind == _DICTIONARY and batches:
            raise ConfigError("it has dictionaries that change, which is not supported")
        elif kind in (_SCHEMA, _DICTIONARY):
            before += bytes(read(at, whole))
        if kind == _SCHEMA:
            try:
                schema = pa.ipc.read_schema(pa.py_buffer(before))
                _ = schema.names  # which pyarrow decodes only now
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise SampleCorrupt(f"it has no schema of Arrow: {error}") from error
        at += whole
    if schema is None:
        raise SampleCorrupt("it is no file of Arrow: it has no schema")
    return _Opened(schema, before, batches)


def _message(head: memoryview) -> tuple[int, int, int]:
    """Return the type of a message, the rows of a batch, and the bytes of its body."""
    try:
        table = _Table.root(head)
        kind, body = table.number(1, "<B"), table.number(3, "<q")
        batch = table.below(2)
        return kind, batch.number(0, "<q") if kind == _BATCH else 0, body
    except (struct.error, ValueError) as error:
        raise SampleCorrupt(f"a message makes no sense: {error}") from error


class _Table:
    """A table of FlatBuffers, in which Arrow writes the metadata of messages."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - self._unpack("<i", at)
        self._length = self._unpack("<H", self._fields)

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        """Return the outermost table."""
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def number(self, field: int, form: str) -> int:
        """Return a number; 0 where the field is not there."""
        at = self._where(field)
        return self._unpack(form, at) if at else 0

    def below(self, field: int) -> _Table:
        """Return the table that a field is; raises ValueError where it is not there."""
        at = self._where(field)
        if not at:
            raise ValueError(f"field {field} is not there")
        return _Table(self._data, at + self._unpack("<I", at))

    def _where(self, field: int) -> int:
        entry = 4 + 2 * field
        offset = self._unpack("<H", self._fields + entry) if entry < self._length else 0
        return self._at + offset if offset else 0

    def _unpack(self, form: str, at: int) -> int:
        if at < 0:
            raise ValueError(f"byte {at}")
        found: int = struct.unpack_from(form, self._data, at)[0]
        return found


def _units(opened: list[_Opened], num_columns: int) -> Units:
    """Return a unit for each batch, the same for each column."""
    batches = [(file, batch) for file, each in enumerate(opened) for batch in each.batches]
    table = np.array([(file, *batch) for file, batch in batches], np.int64).reshape(-1, 4)
    bounds, count = offsets_of(table[:, 3]), num_columns * len(table)
    return Units(
        first_rows=np.tile(bounds[:-1], num_columns),
        of_column=np.arange(num_columns + 1) * len(table),
        ranges=np.arange(count + 1),
        files=np.tile(table[:, 0], num_columns).astype(np.uint32),
        starts=np.tile(table[:, 1], num_columns),
        lengths=np.tile(table[:, 2], num_columns),
        notes=np.zeros(count, np.int64),
        value_bytes=np.tile(table[:, 2] / np.maximum(1, table[:, 3]) / num_columns, num_columns),
    )


def pyarrow() -> Any:
    """Return the module; raises :class:`ConfigError` where it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("pyarrow is not installed: run pip install 'stoker[arrow]'") from error
    return pyarrow


def field_of(field: Any) -> Field:
    """Return what samples hold of a ``pyarrow.Field``.

    Raises :class:`ConfigError` for types that are not supported, :class:`SampleCorrupt` for names
    that are not UTF-8, which pyarrow decodes only when they are asked for.
    """
    try:
        return _field_of(field)
    except UnicodeDecodeError as error:
        raise SampleCorrupt(f"the name of a column is not UTF-8: {error}") from error


def _field_of(field: Any) -> Field:
    pa = pyarrow()
    types, kind, name = pa.types, _stored(field.type), field.name
    if is_media(kind) or types.is_fixed_size_binary(kind) or _is_binary(kind):
        return Field(name, "bytes")
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return Field(name, "text")
    dtype = _dtype(kind)
    if dtype is not None:
        return Field(name, "number", dtype.str)
    if _is_list(kind) and (dtype := _dtype(kind.value_type)) is not None and dtype.kind in "biuf":
        shape = (kind.list_size,) if types.is_fixed_size_list(kind) else None
        return Field(name, "array", dtype.str, shape)
    if _has_dictionary(kind):
        raise ConfigError(f"column {name!r} is {kind}, with a dictionary inside: leave it out")
    schema = pa.schema([pa.field(name, kind)]).serialize().to_pybytes()
    return Field(name, "arrow", schema=schema)


def column_of(array: Any, field: Field) -> Column:
    """Return the values of a ``pyarrow.Array`` of ``n`` rows as bytes, without copies if possible.

    Raises :class:`SampleCorrupt` for a list of whole numbers with a null in it.
    """
    array = _plain(array)
    if is_media(array.type):
        array = pyarrow().compute.struct_field(array, "bytes")
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    make = {"bytes": _binary, "text": _binary, "number": _numbers, "array": _lists}
    packed = make[field.kind](array, field) if field.kind != "arrow" else _batches(array, field)
    if not valid.all() and field.kind in ("number", "arrow"):
        lengths = np.diff(packed.offsets)
        packed = Packed(
            packed.data[np.repeat(valid, lengths)], offsets_of(np.where(valid, lengths, 0))
        )
    return Column(packed, valid)


def _stored(kind: Any) -> Any:
    """Return the type that values are kept in: of an extension, of a dictionary."""
    types = pyarrow().types
    if isinstance(kind, pyarrow().BaseExtensionType):
        return _stored(kind.storage_type)
    return _stored(kind.value_type) if types.is_dictionary(kind) else kind


def _plain(array: Any) -> Any:
    pa = pyarrow()
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
    if isinstance(array.type, pa.BaseExtensionType):
        return _plain(array.storage)
    return _plain(array.dictionary_decode()) if pa.types.is_dictionary(array.type) else array


def _is_binary(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def is_media(kind: Any) -> bool:
    """Whether it is an image or a recording as the Hugging Face Hub keeps them."""
    types = pyarrow().types
    if not types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        return False
    names = {kind.field(number).name for number in range(kind.num_fields)}
    return names <= {"bytes", "path"} and _is_binary(kind.field("bytes").type)


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _has_dictionary(kind: Any) -> bool:
    below = [kind.field(number).type for number in range(kind.num_fields)]
    is_one = bool(pyarrow().types.is_dictionary(kind))
    return is_one or any(_has_dictionary(each) for each in below)


def _dtype(kind: Any) -> np.dtype[Any] | None:
    """Return NumPy's type of numbers and times, or None."""
    types = pyarrow().types
    if types.is_time(kind) or types.is_decimal(kind) or types.is_interval(kind):
        return None
    if not types.is_primitive(kind):
        return None
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype() if types.is_boolean(kind) else "V")
    if types.is_timestamp(kind) or types.is_duration(kind):
        dtype = np.dtype(f"{'M' if types.is_timestamp(kind) else 'm'}8[{kind.unit}]")
    elif types.is_date(kind):
        dtype = np.dtype("M8[D]" if types.is_date32(kind) else "M8[ms]")
    elif types.is_integer(kind) or types.is_floating(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
    return dtype.newbyteorder("<")


def _binary(array: Any, field: Field) -> Packed:
    pa = pyarrow()
    is_small = pa.types.is_binary(array.type) or pa.types.is_string(array.type)
    is_small = is_small or pa.types.is_fixed_size_binary(array.type)
    array = array.cast(pa.binary() if is_small else pa.large_binary())
    if array.null_count:
        array = array.fill_null(pa.scalar(b"", array.type))
    width = np.int32 if is_small else np.int64
    _, offsets, data = array.buffers()
    if not len(array) or offsets is None:
        return Packed(np.empty(0, np.uint8), np.zeros(len(array) + 1, np.int64))
    begin = array.offset
    bounds = np.frombuffer(offsets, width)[begin : begin + len(array) + 1].astype(np.int64)
    flat = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return Packed(flat[bounds[0] : bounds[-1]], bounds - bounds[0])


def _flat(array: Any, dtype: str) -> npt.NDArray[np.uint8]:
    """Return the numbers of an array without nulls, as their bytes."""
    values = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values, dtype).view(np.uint8)


def _numbers(array: Any, field: Field) -> Packed:
    pa = pyarrow()
    if array.null_count:
        array = array.fill_null(pa.scalar(0, pa.int64()).cast(array.type))
    width = np.dtype(field.dtype).itemsize
    return Packed(_flat(array, field.dtype), width * np.arange(len(array) + 1, dtype=np.int64))


def _lists(array: Any, field: Field) -> Packed:
    values = array.flatten()
    if values.null_count:
        if np.dtype(field.dtype).kind != "f":
            raise SampleCorrupt(f"column {field.name!r} has lists with nulls in them")
        values = values.fill_null(float("nan"))
    lengths = pyarrow().compute.list_value_length(array).fill_null(0)
    sizes = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    width = np.dtype(field.dtype).itemsize
    return Packed(_flat(values, field.dtype), offsets_of(width * sizes))


def _batches(array: Any, field: Field) -> Packed:
    pa = pyarrow()
    schema = pa.schema([pa.field(field.name, array.type)])
    rows = (pa.record_batch([array.slice(row, 1)], schema=schema) for row in range(len(array)))
    return Packed(*pack([row.serialize().to_pybytes() for row in rows]))

"""The rows of Arrow's files and streams, and of Feather files, read a record batch at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source.arrow_columns import column_of, field_of, pyarrow
from stoker.source.file_set import AT_ONCE, FileSet
from stoker.source.pace import Pace
from stoker.source.packed import offsets_of
from stoker.source.patterns import Places, find_files
from stoker.source.row_source import KEPT_BYTES, RowSource, Units
from stoker.source.sample_format import Column, SampleFormat, chosen

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
        if kept_bytes < 0:
            raise ConfigError(f"kept_bytes={kept_bytes}: give bytes, 0 or more")
        pace = pace or Pace()
        found = FileSet(find_files(files, ENDINGS, storage_options, pace), storage_options, pace)
        with ThreadPoolExecutor(AT_ONCE, "stoker-index") as pool:
            self._opened = list(pool.map(lambda file: _opened(found, file), range(len(found))))
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
    try:
        return _walked(lambda *where: files.read(file, *where), files.size(file))
    except (ConfigError, SampleCorrupt) as error:
        raise type(error)(f"{files.name(file)}: {error}") from error


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

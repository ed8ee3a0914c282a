"""The rows of Parquet files, read a page at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source.arrow import column_of, field_of, is_media, pyarrow
from stoker.source.file_set import FileSet, Places
from stoker.source.listing import Arrays, kept
from stoker.source.pace import Pace
from stoker.source.packed import offsets_of
from stoker.source.parquet_index import (
    Branch,
    Footer,
    Page,
    chunk_of,
    indexed_pages,
    read_footer,
    small_file,
    walked_pages,
    with_encodings,
)
from stoker.source.row_source import KEPT_BYTES, RowSource, Units
from stoker.source.sample_format import Column, Field, SampleFormat, chosen

ENDINGS = (".parquet", ".pq")


class ParquetSource(RowSource):
    """The rows of Parquet files, in the order of the files and of the rows in them.

    :class:`~stoker.source.sample_format.SampleFormat` says what the bytes of a sample are; a
    column of the Hub's images or recordings, ``{bytes, path}``, is its bytes. Types are Parquet's
    own: what only Arrow knows, like time zones, is left out.

    A read fetches the pages that hold its rows, their dictionary if they refer to it, and no other
    columns. Where they lie is in the files' page indexes, or else in the pages' headers, which are
    read once, a small read each, and also where only some pages have a dictionary; it is kept with
    the listings on local disk, and used as long as name, size and version of all files are the
    same. A column of lists without a page index, and one of several nested values,
    is read a row group at a time. Pages decoded last are kept, ``kept_bytes`` of them in each
    process that reads. Files with small pages are best for random access: pyarrow writes them with
    ``data_page_size=64 << 10, write_page_index=True``.

    For the rest see :class:`RowSource`.
    """

    def __init__(
        self,
        files: Places,
        *,
        columns: str | Sequence[str] | None = None,
        kept_bytes: int = KEPT_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
        cache_index: bool = True,
    ) -> None:
        """Read the footers, and where the pages of ``columns`` lie, or take that from the disk.

        ``files`` are paths, folders or addresses of one bucket or host, with braces and ``*``.
        ``columns`` is a name, or several, by default all. ``storage_options`` and ``pace`` are
        those of :class:`ObjectSource`. ``cache_index=False`` neither uses nor keeps an index.

        Raises :class:`ConfigError` without pyarrow, for no files or rows, a column that is not
        there or of another type in another file, and encrypted files; :class:`SampleCorrupt` for
        damaged ones; :class:`SampleNotFound`; :class:`SourceUnavailable`.
        """
        pyarrow()
        found = FileSet.found(files, ENDINGS, storage_options, pace)
        opened = found.of_each(lambda file: _opened(found, file, columns))
        _check_same(found, opened)

        def made() -> Arrays:
            units = found.of_each(lambda file: _units_of(found, file, opened[file]))
            return dict(vars(_joined(units, [file.num_rows for file in opened])))

        label = "parquet, dictionaries where needed"
        cache = found.index_cache(label, opened[0].names) if cache_index else None
        units = kept(cache, lambda arrays: Units(**arrays), made)
        # Most files of a data set have one schema.
        self._branches = list(dict.fromkeys(file.branches for file in opened))
        self._schema_of = [self._branches.index(file.branches) for file in opened]
        fields, is_single = opened[0].fields, opened[0].is_single
        num_rows = sum(file.num_rows for file in opened)
        about = f"{opened[0].names}{is_single}"
        self._hold(found, SampleFormat(fields, is_single), num_rows, units, kept_bytes, about)

    def _decoded(self, unit: int, num_rows: int, pieces: list[memoryview]) -> Column:
        """Return the values of a page, or of a row group's whole column."""
        units = self._units
        first, end = units.ranges[unit : unit + 2]
        column = units.column_of(unit)
        branch = self._branches[self._schema_of[units.files[first]]][column]
        codecs = units.notes[first:end].tolist()
        # One leaf has a dictionary and a page, or a whole chunk; of several, each has a chunk.
        each = [pieces] if len(branch.leaves) == 1 else [[piece] for piece in pieces]
        made = small_file(branch, num_rows, list(zip(codecs, each, strict=False)))
        return column_of(_read(made).column(0), self.format.fields[column])


class _Opened(NamedTuple):
    """What is needed of a file."""

    footer: Footer
    branches: tuple[Branch, ...]
    fields: tuple[Field, ...]
    is_single: bool

    @property
    def names(self) -> list[str]:
        return [branch.name for branch in self.branches]

    @property
    def num_rows(self) -> int:
        return sum(self.footer.num_rows)


def _opened(files: FileSet, file: int, columns: str | Sequence[str] | None) -> _Opened:
    """Return the footer of a file and what it has of the columns; errors name the file."""
    with files.named(file):
        footer = read_footer(lambda *where: files.read(file, *where), files.size(file))
        names, is_single = chosen(columns, list(footer.branches))
        found = [_branch_and_field(footer.branches[name]) for name in names]
    return _Opened(footer, tuple(b for b, _ in found), tuple(f for _, f in found), is_single)


def _branch_and_field(branch: Branch) -> tuple[Branch, Field]:
    """Return what is read of a column, and what samples have of it."""
    field = _read(small_file(branch, 0, [])).schema.field(0)
    made = field_of(field)
    return branch.only("bytes") if is_media(field.type) else branch, made


def _read(data: bytes) -> Any:
    """Return a small file as a table; raises :class:`SampleCorrupt`, also for wrong checksums."""
    pa = pyarrow()
    try:
        file = pa.parquet.ParquetFile(
            pa.BufferReader(data), pre_buffer=False, page_checksum_verification=True
        )
        table = file.read(use_threads=False)
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SampleCorrupt(f"pyarrow cannot read it: {error}") from error
    return table


def _check_same(files: FileSet, opened: Sequence[_Opened]) -> None:
    """Raise ConfigError unless the columns of all files hold the same."""
    for number, file in enumerate(opened):
        for field, first in zip(file.fields, opened[0].fields, strict=True):
            if field != first:
                raise ConfigError(
                    f"column {field.name!r} is {field.kind} {field.dtype} in {files.name(number)} "
                    f"and {first.kind} {first.dtype} in {files.name(0)}: choose other columns"
                )


class _Unit(NamedTuple):
    """What is decoded at once: a page, or a whole column of a row group."""

    first_row: int
    """In the file."""
    ranges: list[tuple[int, int]]
    """(start, length) of what is read for it."""
    codecs: list[int]
    """Of each range."""
    value_bytes: float


def _units_of(files: FileSet, file: int, opened: _Opened) -> list[list[_Unit]]:
    """Return the units of one file for each column; errors name the file."""
    with files.named(file):
        return [
            list(_column_units(files, file, opened, each)) for each in range(len(opened.fields))
        ]


def _column_units(files: FileSet, file: int, opened: _Opened, column: int) -> Iterator[_Unit]:
    branch, field = opened.branches[column], opened.fields[column]
    first_row = 0
    for group, num_rows in zip(opened.footer.groups, opened.footer.num_rows, strict=True):
        if not num_rows:
            continue
        chunks = [chunk_of(group, leaf, files.size(file)) for leaf in branch.leaves]
        mean = sum(chunk.num_bytes for chunk in chunks) / num_rows
        mean = np.dtype(field.dtype).itemsize if field.kind == "number" else mean
        codecs = [chunk.codec for chunk in chunks]
        leaf, chunk = branch.leaves[0], chunks[0]
        if len(chunks) > 1 or (leaf.is_repeated and not chunk.index_length):
            yield _Unit(first_row, [(each.start, each.length) for each in chunks], codecs, mean)
        else:

            def read(start: int, length: int) -> memoryview:
                return files.read(file, start, length)

            has_index = chunk.index_length > 0
            pages = indexed_pages(chunk, read) if has_index else walked_pages(chunk, read, num_rows)
            end = chunk.start + chunk.length
            pages = _checked(pages, num_rows, chunk.start, end)
            if has_index and chunk.is_mixed:
                pages = with_encodings(pages, read)
            before = [(chunk.start, pages[0].start - chunk.start)]
            dictionary = before if before[0][1] else []
            for page in pages:
                ranges = [*(dictionary if page.needs_dictionary else ()), (page.start, page.length)]
                yield _Unit(first_row + page.first_row, ranges, codecs * len(ranges), mean)
        first_row += num_rows


def _checked(pages: list[Page], num_rows: int, start: int, end: int) -> list[Page]:
    """Return the pages that have rows; raises SampleCorrupt unless they are those of a column."""
    rows = [*(page.first_row for page in pages), num_rows]
    inside = all(
        type(page.start) is type(page.length) is type(page.first_row) is int
        and start <= page.start <= page.start + page.length <= end
        for page in pages
    )
    if not inside or rows[0] != 0 or any(a > b for a, b in pairwise(rows)):
        raise SampleCorrupt(f"its pages are not those of {num_rows} rows")
    return [page for page, (a, b) in zip(pages, pairwise(rows), strict=True) if a < b]


def _joined(files: list[list[list[_Unit]]], num_rows: list[int]) -> Units:
    """Return the units of all files, column by column."""
    first_rows = offsets_of(np.array(num_rows, np.int64)).tolist()
    units: list[tuple[int, int, _Unit]] = []  # with the file, and its first row
    counts = []
    for column in range(len(files[0])):
        before = len(units)
        for file, first in enumerate(first_rows[:-1]):
            units += [(file, first, unit) for unit in files[file][column]]
        counts.append(len(units) - before)
    ranges = [(file, *where) for file, _, unit in units for where in unit.ranges]
    table = np.array(ranges, np.int64).reshape(-1, 3)
    return Units(
        first_rows=np.array([first + unit.first_row for _, first, unit in units], np.int64),
        of_column=offsets_of(np.array(counts, np.int64)),
        ranges=offsets_of(np.array([len(unit.ranges) for _, _, unit in units], np.int64)),
        files=table[:, 0].astype(np.uint32),
        starts=table[:, 1].copy(),
        lengths=table[:, 2].copy(),
        notes=np.array([codec for _, _, unit in units for codec in unit.codecs], np.int64),
        value_bytes=np.array([unit.value_bytes for _, _, unit in units], np.float64),
    )

"""Where the pages of Parquet files lie, and small files made of some of them for pyarrow to decode.

pyarrow decodes row groups, of tens of megabytes. To have it decode one page, a page is given a
footer of its own: that of the file, with one column, one row group and that page only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source import thrift
from stoker.source.packed import Buffer
from stoker.source.thrift import Struct, value

MAGIC = b"PAR1"
_TAIL = 64 << 10  # bytes at the end of a file that are read first; most footers fit
_HEADER, _LARGEST_HEADER = 256, 1 << 20  # bytes read for a page's header, most and at most
_DATA, _DATA_V2 = 0, 3  # types of pages
_BY_DICTIONARY = (2, 8)  # encodings: the older and the newer name of one
_REPEATED = 2
_DEEPEST = 32

Read = Callable[[int, int], memoryview]
"""Returns bytes of a file: so many from this position."""
_NONSENSE = (TypeError, ValueError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True)
class Leaf:
    """A column of plain values; one of nested values has several."""

    number: int
    """Among all leaves of the file."""
    type: int
    path: tuple[bytes, ...]
    is_repeated: bool


@dataclass(frozen=True)
class Branch:
    """A file's column by name, with its leaves, and what a file of it alone has in its footer."""

    name: str
    leaves: tuple[Leaf, ...]
    created_by: bytes
    schema: tuple[bytes, ...]
    """The elements of the schema, in Thrift: the root, this column and what is below it."""

    def only(self, child: str) -> Branch:
        """Return the structure with one of its plain values."""
        root, top, *below = self.schema
        kept = [leaf.path[-1].decode() for leaf in self.leaves].index(child)
        top = thrift.write_struct({**thrift.read_struct(top)[0], 5: (thrift.I32, 1)})
        return Branch(self.name, (self.leaves[kept],), self.created_by, (root, top, below[kept]))


@dataclass(frozen=True)
class Footer:
    """What a file says about itself."""

    branches: dict[str, Branch]
    groups: list[Struct]
    num_rows: list[int]
    """Of each row group."""


@dataclass(frozen=True)
class Chunk:
    """The pages of one leaf in one row group, one after the other."""

    codec: int
    start: int
    """Where the first page lies: that of the dictionary, if there is one."""
    length: int
    num_bytes: int
    """When decoded, as far as the file says."""
    index_start: int
    """Where the index of its pages lies."""
    index_length: int
    """0 without an index."""
    is_mixed: bool
    """Whether the file says that only some of its pages refer to the dictionary."""


@dataclass(frozen=True)
class Page:
    """One page of data, with its header."""

    first_row: int
    """In its row group."""
    start: int
    length: int
    needs_dictionary: bool = True
    """Whether its values refer to the dictionary, as far as is known."""


def read_footer(read: Read, size: int) -> Footer:
    """Return the footer of a file of ``size`` bytes.

    Raises :class:`SampleCorrupt` for what is no Parquet file, :class:`ConfigError` for an encrypted
    one, and what ``read`` does.
    """
    if size < 12:
        raise SampleCorrupt(f"{size} bytes are no Parquet file")
    tail = read(max(0, size - _TAIL), min(size, _TAIL))
    if bytes(tail[-4:]) == b"PARE":
        raise ConfigError("its footer is encrypted, which is not supported")
    length = int.from_bytes(tail[-8:-4], "little")
    if bytes(tail[-4:]) != MAGIC or length > size - 12:
        raise SampleCorrupt("it does not end like a Parquet file: it is cut off, or is none")
    if length + 8 > len(tail):
        tail = read(size - length - 8, length + 8)
    try:
        return _parsed(thrift.read_struct(tail[-length - 8 : -8])[0])
    except _NONSENSE as error:
        raise _damaged(error) from error


def _damaged(error: Exception) -> SampleCorrupt:
    return SampleCorrupt(f"its footer makes no sense: {type(error).__name__}: {error}")


def _parsed(meta: Struct) -> Footer:
    elements, groups = value(meta, 2)[1], value(meta, 4)[1]
    root = thrift.write_struct({**elements[0], 5: (thrift.I32, 1)})
    branches: dict[str, Branch] = {}
    leaves: list[Leaf] = []
    at = 1
    for _ in range(value(elements[0], 5, 0)):
        begin, first, name = at, len(leaves), value(elements[at], 4).decode()
        at = _add_leaves(leaves, elements, at, (), False)
        schema = (root, *map(thrift.write_struct, elements[begin:at]))
        writer = _typed(meta, 6, thrift.BINARY) if 6 in meta else b""
        branches[name] = Branch(name, tuple(leaves[first:]), writer, schema)
    rows = [value(group, 3) for group in groups]
    if any(type(count) is not int or count < 0 for count in rows):
        raise ValueError(f"row groups of {rows} rows")
    return Footer(branches, groups, rows)


def _typed(fields: Struct, number: int, kind: int) -> Any:
    """Return a field that has to be there, of this type; raises ValueError."""
    if fields[number][0] != kind:
        raise ValueError(f"field {number} of type {fields[number][0]}, not {kind}")
    return value(fields, number)


def _add_leaves(
    leaves: list[Leaf], elements: list[Struct], at: int, path: tuple[bytes, ...], is_repeated: bool
) -> int:
    """Add those at and below ``elements[at]``; return where the next element beside it is."""
    if len(path) > _DEEPEST:
        raise ValueError("columns nested too deep")
    element = elements[at]
    path = (*path, bytes(_typed(element, 4, thrift.BINARY)))
    is_repeated = is_repeated or value(element, 3, 0) == _REPEATED
    children = value(element, 5, 0)
    if not children:
        leaves.append(Leaf(len(leaves), _typed(element, 1, thrift.I32), path, is_repeated))
    at += 1
    for _ in range(children):
        at = _add_leaves(leaves, elements, at, path, is_repeated)
    return at


def chunk_of(group: Struct, leaf: Leaf, size: int) -> Chunk:
    """Return where the pages of a leaf of a row group lie, in a file of ``size`` bytes.

    Raises :class:`SampleCorrupt` where that makes no sense, :class:`ConfigError` for a file whose
    columns lie in others.
    """
    try:
        about = value(group, 1)[1][leaf.number]
        meta = value(about, 3)
        data, dictionary = value(meta, 9), value(meta, 11, 0)
        # Newer files say how many bytes the values have; else it is how many their pages have.
        exact = value(value(meta, 16, {}), 1)
        chunk = Chunk(
            codec=value(meta, 4),
            start=dictionary if 0 < dictionary < data else data,
            length=value(meta, 7),
            num_bytes=value(meta, 6) if exact is None else exact,
            index_start=value(about, 4, 0),
            index_length=value(about, 5, 0),
            is_mixed=_is_mixed(meta),
        )
        numbers = [number for name, number in vars(chunk).items() if name != "is_mixed"]
        is_inside = chunk.start + chunk.length <= size >= chunk.index_start + chunk.index_length
        if min(numbers) < 0 or chunk.codec > 255 or not is_inside:
            raise ValueError(f"pages at {chunk} in a file of {size} bytes")
    except _NONSENSE as error:
        raise _damaged(error) from error
    if 1 in about:
        raise ConfigError("its columns lie in other files, which is not supported")
    return chunk


def _is_mixed(meta: Struct) -> bool:
    """Return whether pages of data are counted that refer to a dictionary, and others."""
    counted = value(meta, 13, (0, []))[1]
    pages = [each for each in counted if value(each, 1) in (_DATA, _DATA_V2) and value(each, 3)]
    return len({value(each, 2) in _BY_DICTIONARY for each in pages}) > 1


def indexed_pages(chunk: Chunk, read: Read) -> list[Page]:
    """Return the pages of a chunk by its index; SampleCorrupt for one that makes no sense."""
    try:
        index = read(chunk.index_start, chunk.index_length)
        locations = value(thrift.read_struct(index)[0], 1)[1]
        return [Page(value(each, 3), value(each, 1), value(each, 2)) for each in locations]
    except _NONSENSE as error:
        raise SampleCorrupt(f"an index of pages makes no sense: {error!r}") from error


def walked_pages(chunk: Chunk, read: Read, num_rows: int) -> list[Page]:
    """Return the pages of a flat column by their headers, one read of a few bytes for each.

    Raises :class:`SampleCorrupt` where headers make no sense.
    """
    pages: list[Page] = []
    at, end, row = chunk.start, chunk.start + chunk.length, 0
    while at < end and row < num_rows:
        header, head_bytes = _header(read, at, end)
        whole = head_bytes + _number(header, 3)
        if (about := _of_data(header)) is not None:
            pages.append(Page(row, at, whole, _needs_dictionary(header)))
            row += _number(about, 1 if value(header, 1) == _DATA else 3)
        at += whole
    return pages


def with_encodings(pages: Sequence[Page], read: Read) -> list[Page]:
    """Return pages with what their headers say of the dictionary, one read of a few bytes for each.

    Raises :class:`SampleCorrupt` where headers make no sense.
    """
    headers = [_header(read, page.start, page.start + page.length)[0] for page in pages]
    return [
        replace(page, needs_dictionary=_needs_dictionary(header))
        for page, header in zip(pages, headers, strict=True)
    ]


def _needs_dictionary(header: Struct) -> bool:
    about = _of_data(header)
    return about is None or value(about, 2 if value(header, 1) == _DATA else 4) in _BY_DICTIONARY


def _header(read: Read, at: int, end: int) -> tuple[Struct, int]:
    """Return the header of the page at ``at``, and its length."""
    most = _HEADER
    while True:
        data = read(at, min(most, end - at))
        try:
            return thrift.read_struct(data)
        except SampleCorrupt:
            if len(data) < most or most >= _LARGEST_HEADER:
                raise
        most *= 16


def _of_data(header: Struct) -> Struct | None:
    """Return what a page's header says about its data; None for a page without."""
    kind = value(header, 1)
    about = value(header, 5 if kind == _DATA else 8) if kind in (_DATA, _DATA_V2) else None
    if not isinstance(about, dict | None):
        raise SampleCorrupt(f"a page's header says {about!r:.100}")
    return about


def _number(fields: Struct, number: int) -> int:
    found = value(fields, number)
    if type(found) is not int or found < 0:
        raise SampleCorrupt(f"a page's header says {found}")
    return found


def _num_values(pages: Buffer) -> int:
    """Return the values in consecutive pages, nulls included."""
    at = found = 0
    while at < len(pages):
        header, begin = thrift.read_struct(pages, at)
        about = _of_data(header)
        found += 0 if about is None else _number(about, 1)
        at = begin + _number(header, 3)
    return found


def small_file(
    branch: Branch, num_rows: int, leaves: Sequence[tuple[int, Sequence[Buffer]]]
) -> bytes:
    """Return a Parquet file of one column, of ``num_rows`` rows.

    ``leaves`` are (codec, pieces that consist of whole pages) of each of its leaves; without, the
    file has no rows.
    """
    columns: list[Struct] = []
    at = len(MAGIC)
    for leaf, (codec, pieces) in zip(branch.leaves, leaves, strict=False):
        num_bytes = sum(map(len, pieces))
        meta: Struct = {
            1: (thrift.I32, leaf.type),
            2: (thrift.LIST, (thrift.I32, [0, 3, 8])),  # plain, by levels, by dictionary
            3: (thrift.LIST, (thrift.BINARY, list(leaf.path))),
            4: (thrift.I32, codec),
            5: (thrift.I64, sum(map(_num_values, pieces))),
            6: (thrift.I64, num_bytes),
            7: (thrift.I64, num_bytes),
            9: (thrift.I64, at),
        }
        columns.append({2: (thrift.I64, at), 3: (thrift.STRUCT, meta)})
        at += num_bytes
    group: dict[int, tuple[int, Any]] = {
        1: (thrift.LIST, (thrift.STRUCT, columns)),
        2: (thrift.I64, at),
        3: (thrift.I64, num_rows),
    }
    schema = [thrift.read_struct(element)[0] for element in branch.schema]
    footer: Struct = {
        1: (thrift.I32, 2),
        2: (thrift.LIST, (thrift.STRUCT, schema)),
        3: (thrift.I64, num_rows),
        4: (thrift.LIST, (thrift.STRUCT, [group] if columns else [])),
        6: (thrift.BINARY, branch.created_by),
    }
    written = thrift.write_struct(footer)
    pages = [piece for _, pieces in leaves for piece in pieces]
    return b"".join([MAGIC, *pages, written, len(written).to_bytes(4, "little"), MAGIC])

"""Structures in Thrift's compact protocol, in which Parquet writes footers and page headers.

A structure is a dictionary of its fields by number, each with its type: what is not understood is
kept, so that a footer can be written again with some of its fields changed.
"""

from __future__ import annotations

from typing import Any

from stoker.errors import SampleCorrupt

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
Struct = dict[int, tuple[int, Any]]
"""Field number -> (type, value). A list is (type of its items, items)."""

_DEEPEST = 32


def read_struct(data: bytes | memoryview, at: int = 0) -> tuple[Struct, int]:
    """Return the structure at byte ``at``, and where it ends.

    Raises :class:`SampleCorrupt` for bytes that are no structure, in time and memory in proportion
    to them.
    """
    reader = _Reader(data, at)
    try:
        return reader.struct(_DEEPEST), reader.at
    except (IndexError, ValueError) as error:
        raise SampleCorrupt(f"byte {reader.at} of {len(data)} is not Thrift: {error}") from error


def value(fields: Struct, number: int, default: Any = None) -> Any:
    """Return the value of field ``number``, or ``default`` where it is not there."""
    found = fields.get(number)
    return default if found is None else found[1]


class _Reader:
    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self._data, self.at = memoryview(data), at

    def struct(self, depth: int) -> Struct:
        if depth == 0:
            raise ValueError("too deep")
        fields: Struct = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._zigzag()
            fields[number] = (kind, self._field(kind, depth))
        return fields

    def _field(self, kind: int, depth: int) -> Any:
        return kind == TRUE if kind in (TRUE, FALSE) else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (I16, I32, I64):
            return self._zigzag()
        if kind == BINARY:
            return self._take(self._varint())
        if kind == STRUCT:
            return self.struct(depth - 1)
        if kind in (LIST, SET):
            return self._list(depth - 1)
        if kind == DOUBLE:
            return self._take(8)
        if kind in (TRUE, FALSE, BYTE):
            return self._byte()
        raise ValueError(f"type {kind}")

    def _list(self, depth: int) -> tuple[int, list[Any]]:
        head = self._byte()
        length, kind = head >> 4, head & 15
        if length == 15:
            length = self._varint()
        if depth <= 0 or length > len(self._data) - self.at:  # an item has a byte or more
            raise ValueError(f"a list of {length}")
        return kind, [self._value(kind, depth) for _ in range(length)]

    def _byte(self) -> int:
        found = self._data[self.at]
        self.at += 1
        return found

    def _take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self._data):
            raise ValueError(f"{length} bytes are cut off")
        found = bytes(self._data[self.at : end])
        self.at = end
        return found

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _zigzag(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)


def write_struct(fields: Struct) -> bytes:
    """Return the structure as bytes."""
    out = bytearray()
    before = 0
    for number, (kind, value) in sorted(fields.items()):
        if kind in (TRUE, FALSE):
            kind = TRUE if value else FALSE
        step = number - before
        if 0 < step < 16:
            out.append(step << 4 | kind)
        else:
            out.append(kind)
            out += _zigzag(number)
        if kind not in (TRUE, FALSE):
            out += _written(kind, value)
        before = number
    out.append(0)
    return bytes(out)


def _written(kind: int, value: Any) -> bytes:
    if kind in (I16, I32, I64):
        return _zigzag(value)
    if kind == BINARY:
        return _varint(len(value)) + bytes(value)
    if kind == STRUCT:
        return write_struct(value)
    if kind in (LIST, SET):
        of, items = value
        head = (
            bytes([len(items) << 4 | of])
            if len(items) < 15
            else bytes([240 | of]) + _varint(len(items))
        )
        return head + b"".join(_written(of, item) for item in items)
    if kind == DOUBLE:
        return bytes(value)
    return bytes([value])


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _zigzag(number: int) -> bytes:
    return _varint(number << 1 if number >= 0 else (-number << 1) - 1)

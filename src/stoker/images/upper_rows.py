"""JPEG files that end early, because the rows below are not needed.

A decoder reads a file's rows in order. If the header names fewer rows it stops there, and what is
left of the file is only searched for its end.
"""

from __future__ import annotations

_BASELINE = (0xC0, 0xC1)  # frames whose rows follow each other; progressive ones come in layers
_END = b"\xff\xd9"
_ROOM = 16  # rows that interpolating the colours of the last one looks at, at most


def upper_rows(data: bytes | memoryview, height: int, rows: int) -> tuple[bytearray, int] | None:
    """Return a JPEG file with the first ``rows`` of ``height`` pixels, and its own height.

    It has some more rows, so that those asked for come out as from the whole file. None if nothing
    is saved, the file is progressive, or it does not end as it should: then it must be read to its
    end. ``data`` must have a valid header. A decoder warns of what follows the last row.
    """
    kept = rows + _ROOM
    if kept >= height or data[-2:] != _END:
        return None
    offset = _offset_of_height(data)
    if offset is None:
        return None
    shortened = bytearray(data)
    shortened[offset : offset + 2] = kept.to_bytes(2)
    return shortened, kept


def _offset_of_height(data: bytes | memoryview) -> int | None:
    """Return where the header names the height, None if the file is not of the baseline kind."""
    offset = 2
    while offset + 4 <= len(data) and data[offset] == 0xFF:
        kind = data[offset + 1]
        if kind in _BASELINE:
            return offset + 5
        if kind < 0xC0 or kind in (0xC2, 0xDA):
            return None
        offset += 2 + int.from_bytes(data[offset + 2 : offset + 4])
    return None

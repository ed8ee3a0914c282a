"""A sample of several parts (an image, its label, ...) as one run of bytes.

A part is written as its header, its name and its data; parts follow one another, and the sample
ends with the last of them. The header is 10 bytes, little-endian::

    u16  length of the name
    u64  length of the data
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from stoker.errors import SampleCorrupt

HEADER = struct.Struct("<HQ")


def join_parts(parts: Mapping[str, bytes]) -> bytes:
    """Return the parts, by name, as one sample."""
    return b"".join(
        piece for name, data in parts.items() for piece in (part_header(name, len(data)), data)
    )


def part_header(name: str, num_bytes: int) -> bytes:
    """Return what comes before the ``num_bytes`` bytes of the part ``name``."""
    encoded = name.encode()
    return HEADER.pack(len(encoded), num_bytes) + encoded


def split_parts(sample: bytes | memoryview) -> dict[str, memoryview]:
    """Return the parts of a sample by name, in order, as views of it.

    Raises :class:`SampleCorrupt` when it does not consist of parts.
    """
    view = memoryview(sample)
    parts: dict[str, memoryview] = {}
    at = 0
    while at < len(view):
        if at + HEADER.size > len(view):
            raise SampleCorrupt(f"the header of a part at byte {at} of {len(view)} is cut off")
        name_bytes, data_bytes = HEADER.unpack_from(view, at)
        begin = at + HEADER.size + name_bytes
        if begin + data_bytes > len(view):
            raise SampleCorrupt(
                f"a part of {data_bytes} bytes at byte {at} does not fit into {len(view)} bytes"
            )
        try:
            name = str(view[at + HEADER.size : begin], "utf-8")
        except UnicodeDecodeError as error:
            raise SampleCorrupt(f"the part at byte {at} has no name in UTF-8") from error
        parts[name] = view[begin : begin + data_bytes]
        at = begin + data_bytes
    return parts

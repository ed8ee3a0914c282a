"""Samples in memory: many in one array, and one that has several named parts."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SampleCorrupt

_FEW = 8  # so many passes take less time than one sort

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Buffer = bytes | memoryview
"""One sample's bytes, flat."""

HEADER = struct.Struct("<HQ")
"""What precedes each part of a sample: ``u16`` length of the name, ``u64`` length of the data.

Name and data follow it. Parts (an image, its label, ...) follow one another, and the sample ends
with the last of them.
"""


def pack(samples: Sequence[Buffer]) -> tuple[Bytes, Offsets]:
    """Return the samples one after the other as u8[total], and where each begins as i64[n + 1]."""
    return np.frombuffer(b"".join(samples), np.uint8), offsets_of(
        np.fromiter(map(len, samples), np.int64, len(samples))
    )


def unpack(data: Bytes, offsets: Offsets) -> list[bytes]:
    """Return the samples of a packed batch as one bytes object each."""
    view = data.data
    bounds = offsets.tolist()
    return [bytes(view[a:b]) for a, b in pairwise(bounds)]


def offsets_of(sizes: NDArray[np.integer[Any]]) -> Offsets:
    """Return i64[n + 1]: where each of consecutive pieces begins, and where the last one ends."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


class Packed(NamedTuple):
    """``n`` samples in one buffer: sample ``i`` is ``data[offsets[i]:offsets[i + 1]]``."""

    data: Bytes
    """``u8[total]``, the samples one after the other."""
    offsets: Offsets
    """``i64[n + 1]``, bytes; never decreasing."""


def pick(packed: Packed, index: NDArray[np.int64]) -> Packed:
    """Return the samples ``index`` (``i64[m]``) of ``packed``, in that order."""
    return gather([packed], np.zeros(len(index), np.int64), index)


def gather(parts: Sequence[Packed], part: NDArray[np.int64], index: NDArray[np.int64]) -> Packed:
    """Return ``m`` samples, the ``i``-th being sample ``index[i]`` of ``parts[part[i]]``.

    ``part`` and ``index`` are ``i64[m]``. Neighbours that lie together already are copied
    together, and when all of them do the result is a view and nothing is copied.
    """
    if not any(len(data) for data, _ in parts):  # as all of a simulation is
        return Packed(np.empty(0, np.uint8), np.zeros(len(part) + 1, np.int64))
    starts = np.zeros(len(part), np.int64)
    ends = np.zeros(len(part), np.int64)
    for (_, offsets), mine in zip(parts, by_part(part, len(parts)), strict=True):
        starts[mine] = offsets[index[mine]]
        ends[mine] = offsets[index[mine] + 1]
    offsets = offsets_of(ends - starts)
    if not offsets[-1]:
        return Packed(np.empty(0, np.uint8), offsets)
    apart = (part[1:] != part[:-1]) | (starts[1:] != ends[:-1])
    breaks = np.flatnonzero(apart)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(part) - 1)
    runs = zip(part[firsts].tolist(), starts[firsts].tolist(), ends[lasts].tolist(), strict=True)
    chunks = [parts[number].data[start:end] for number, start, end in runs]
    return Packed(chunks[0] if len(chunks) == 1 else np.concatenate(chunks), offsets)


def by_part(part: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Return, for each number below ``count``, where ``part`` (``i64[m]``) is that: ``i64[*]``."""
    if count <= _FEW:
        return [np.flatnonzero(part == number) for number in range(count)]
    order = np.argsort(part, kind="stable")
    bounds = np.searchsorted(part[order], np.arange(count + 1))
    return [order[begin:end] for begin, end in pairwise(bounds.tolist())]


def join_parts(parts: Mapping[str, Buffer]) -> bytes:
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

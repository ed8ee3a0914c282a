"""Many samples in one array: their bytes one after the other, and their offsets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Buffer = bytes | memoryview
"""One sample's bytes, flat."""


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
    starts = np.zeros(len(part), np.int64)
    ends = np.zeros(len(part), np.int64)
    for number, (_, offsets) in enumerate(parts):
        mine = part == number
        starts[mine] = offsets[index[mine]]
        ends[mine] = offsets[index[mine] + 1]
    offsets = np.zeros(len(part) + 1, np.int64)
    np.cumsum(ends - starts, out=offsets[1:])
    if not len(part):
        return Packed(np.empty(0, np.uint8), offsets)
    apart = (part[1:] != part[:-1]) | (starts[1:] != ends[:-1])
    breaks = np.flatnonzero(apart)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(part) - 1)
    runs = zip(part[firsts].tolist(), starts[firsts].tolist(), ends[lasts].tolist(), strict=True)
    chunks = [parts[number].data[start:end] for number, start, end in runs]
    return Packed(chunks[0] if len(chunks) == 1 else np.concatenate(chunks), offsets)

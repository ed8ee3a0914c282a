"""Many samples in one array: their bytes one after the other, and where each one begins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


def pack(samples: Sequence[bytes]) -> tuple[Bytes, Offsets]:
    """Return the samples one after the other as u8[total], and where each begins as i64[n + 1]."""
    return np.frombuffer(b"".join(samples), np.uint8), offsets_of(
        np.fromiter(map(len, samples), np.int64, len(samples))
    )


def unpack(data: Bytes, offsets: Offsets) -> list[bytes]:
    """Return the samples of a packed batch as one bytes object each."""
    view = data.data
    bounds = offsets.tolist()
    return [bytes(view[a:b]) for a, b in pairwise(bounds)]


def offsets_of(sizes: npt.NDArray[np.integer[Any]]) -> Offsets:
    """Return i64[n + 1]: where each of consecutive pieces begins, and where the last one ends."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets

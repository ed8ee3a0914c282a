"""Samples that say who they are: the bytes of an id can be told from those of any other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_IDS = 2000
_NOISE = np.random.default_rng(5).integers(0, 256, 1 << 20, np.uint8)
_LARGEST = 200_000
_STRIDE = 337  # apart in the noise: more than a block, and NUM_IDS strides end before its end


def _sizes() -> NDArray[np.int64]:
    sizes = np.random.default_rng(7).lognormal(np.log(3000), 1.5, NUM_IDS)
    sizes = np.minimum(sizes, _LARGEST).astype(np.int64)
    sizes[:6] = 0, 1, 63, 64, 65, _LARGEST
    return sizes


SIZES = _sizes()
"""i64[NUM_IDS]: bytes of each sample, from none to 200 KB."""


def sample(id: int) -> NDArray[np.uint8]:
    """Return the bytes of one sample: a window of the noise that begins at a place of its own."""
    begin = int(id) * _STRIDE
    return _NOISE[begin : begin + int(SIZES[id])]


def packed(ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return samples as ``(data, offsets)``."""
    offsets = np.concatenate(([0], np.cumsum(SIZES[ids])))
    parts = [sample(id) for id in ids]
    return np.concatenate([np.empty(0, np.uint8), *parts]), offsets


def wrong(
    ids: NDArray[np.uint32],
    got: tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]],
) -> list[int]:
    """Return those ids that were found with other bytes than their own."""
    data, offsets, found = got
    return [
        int(id)
        for i, id in enumerate(ids)
        if not np.array_equal(
            data[offsets[i] : offsets[i + 1]], sample(id) if found[i] else _NOISE[:0]
        )
    ]

"""Samples of several lengths whose every token is their number, plus one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.source import MemorySource


def lengths_of(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(count).integers(1, 31, count)


def texts(count: int) -> MemorySource:
    return MemorySource(
        [
            np.full(length, 1 + number, np.uint16).tobytes()
            for number, length in enumerate(lengths_of(count).tolist())
        ]
    )


def tokens_of(data: Any) -> NDArray[np.uint16]:
    return np.frombuffer(data, np.uint16)


def check_batch(data: dict[str, Any], ids: NDArray[np.uint32], count: int) -> None:
    """Every token of the samples ``ids`` is in the batch, and no other."""
    shown = np.bincount(np.asarray(data["tokens"]).ravel(), minlength=1 + count)[1:]
    expected = np.zeros(count, int)
    expected[ids] = lengths_of(count)[ids]
    assert shown.tolist() == expected.tolist()

"""Random numbers of augmentation, tied to the place of a sample in the plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1


def sample_seeds(seed: int, epoch: int, positions: NDArray[np.int64]) -> list[int]:
    """Return a 64-bit seed for each of ``positions``, ``i64[n]``, the places in the epoch's plan.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of a counter, keyed by seed and epoch.
    """
    key = _mix(np.array([seed & _WORD, epoch & _WORD], np.uint64))
    base = key[0] ^ _mix(key[1:])[0]
    mixed: list[int] = _mix(
        base + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ).tolist()
    return mixed


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))

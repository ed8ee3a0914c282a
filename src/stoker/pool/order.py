"""Importance as time to live: how long each sample may stay in a pool."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.shared import SharedArray
from stoker.store.tier import Ids, Keys

LEVELS = 64
"""Ranks are told apart so finely."""

_LEAST_DAYS, _STEP_DAYS = 1.0, 0.5
_DAY_MS = 24 * 3600 * 1000


class PoolOrder:
    """The level of each sample, 0 to ``LEVELS - 1``; a higher one lives longer.

    With keys that say what a sample is worth, the level is the rank of a sample's key among all
    keys, as :meth:`learn` saw them last. Without (``takes_keys=False``), as for policies without
    keys of their own and those whose keys are times of the next use, where what was just used
    always ranks last, there is a fixed random order: what is
    kept is then the same set on all machines and at all times, and nothing hits more bytes when
    each sample is visited once an epoch. Time to live grows by half a day a level, from a day on,
    so that what nobody asks for any more goes in the end, and ranks weigh more than ages.

    Only samples whose rank lies in the best ``share`` are worth storing. All is kept in shared
    memory: forked children and processes that receive it by pickling see it change. Safe in any
    thread; one process learns.
    """

    def __init__(self, *, takes_keys: bool = True) -> None:
        self.takes_keys = takes_keys
        # 0: share; 1: whether keys are known; then the least key of each level but the first
        self._table = SharedArray.create(LEVELS + 1, np.float64, name="stoker-pool-order")
        self._table.array[:2] = 1.0, 0.0

    @property
    def share(self) -> float:
        """The share of samples that are stored, 0 to 1."""
        return float(self._table.array[0])

    @share.setter
    def share(self, value: float) -> None:
        self._table.array[0] = value

    def learn(self, keys: NDArray[np.float64]) -> None:
        """Take ``keys`` (``f64[N]``) as those of all samples."""
        if not self.takes_keys or not len(keys):
            return
        edges = np.arange(1, LEVELS) * len(keys) // LEVELS
        self._table.array[2:] = np.partition(np.nan_to_num(keys), edges)[edges]
        self._table.array[1] = 1.0

    def levels(self, ids: Ids, keys: Keys = None) -> NDArray[np.uint8]:
        """Return the levels ``u8[n]`` of samples with these keys."""
        # Multiplied by 2^32 / golden ratio: neighbouring ids lie far apart, all evenly.
        mixed = (ids * np.uint32(2654435769)) >> np.uint32(32 - LEVELS.bit_length() + 1)
        if keys is None or not self._table.array[1]:
            return np.asarray(mixed, np.uint8)
        edges, keys = self._table.array[2:], np.nan_to_num(keys)
        low = np.searchsorted(edges, keys, side="left")
        high = np.searchsorted(edges, keys, side="right")
        # Equal keys, which may be all of them at first, spread over the levels they stand for.
        return np.asarray(low + mixed * (high - low + 1) // LEVELS, np.uint8)

    def is_worth_storing(self, levels: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which levels ``u8[n]`` are among the share that is stored."""
        worth: NDArray[np.bool_] = (levels + 1.0) / LEVELS > 1.0 - self.share
        return worth

    @staticmethod
    def lifetimes(levels: NDArray[np.uint8]) -> list[int]:
        """Return the times to live of levels ``u8[n]``, in milliseconds."""
        days = _LEAST_DAYS + levels.astype(np.float64) * _STEP_DAYS
        lifetimes: list[int] = (days * _DAY_MS).astype(np.int64).tolist()
        return lifetimes

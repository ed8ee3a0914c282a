"""Which samples lie in the cache because a package brought them."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from stoker.store.tier import Ids


class Flags:
    """``u8[N]`` in the memory of every rank: 1 at what a package brought. Safe in any thread."""

    def __init__(self, num_samples: int) -> None:
        self._own = np.zeros(num_samples, np.uint8)
        self._outlets: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def set(self, ids: Ids) -> None:
        """Say that a package brings these."""
        self._write(ids, 1)

    def clear(self, ids: Ids) -> None:
        """Say that these lie there no more, or for another reason."""
        self._write(ids, 0)

    @property
    def ids(self) -> Ids:
        """The samples that are flagged, ``u32[n]``."""
        return np.flatnonzero(self._own).astype(np.uint32)

    def join(self, outlet: NDArray[np.uint8]) -> None:
        """Write to ``outlet`` (``u8[N]``) too from now on, and take over what it says."""
        with self._lock:
            # What a predecessor of this process brought is there still.
            np.maximum(self._own, outlet, out=self._own)
            self._outlets.append(outlet)
            for other in self._outlets:
                other[:] = self._own

    def leave(self, outlet: NDArray[np.uint8]) -> None:
        """Write to it no more."""
        with self._lock:
            self._outlets = [other for other in self._outlets if other is not outlet]

    def _write(self, ids: Ids, value: int) -> None:
        with self._lock:
            self._own[ids] = value
            for outlet in self._outlets:
                outlet[ids] = value

"""A storage that only waits: a latency per sample, and a limit on what is under way."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from stoker.source.base import BaseSource


class Waiting(BaseSource):
    """Samples of zeros, each after ``latency`` seconds; ``lanes`` at a time in each process."""

    def __init__(self, count: int, size: int, lanes: int, latency: float) -> None:
        self.sizes = np.full(count, size, np.int64)
        self.fingerprint = f"waiting-{count}-{size}"
        self._lanes, self._latency = lanes, latency

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def lanes(self) -> int:
        """Threads that read at once."""
        return self._lanes

    def read_one(self, sample_id: int) -> bytes:
        """Return one sample, late."""
        time.sleep(self._latency)
        return bytes(int(self.sizes[sample_id]))

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return samples one after another."""
        return [self.read_one(int(sample)) for sample in np.asarray(ids)]

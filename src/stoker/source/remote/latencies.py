"""How long recent requests took, to tell when one is late."""

from __future__ import annotations

import threading

import numpy as np

_WINDOW = 1024
_ENOUGH = 64
_REFRESH = 32


class Latencies:
    """The last thousand latencies and a percentile of them. Thread-safe."""

    def __init__(self, quantile: float) -> None:
        """Watch the ``quantile`` (between 0 and 1) of the latencies."""
        self._quantile = quantile
        self._recent = np.zeros(_WINDOW)
        self._count = 0
        self._late: float | None = None
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Note how long a request took."""
        with self._lock:
            self._recent[self._count % _WINDOW] = seconds
            self._count += 1
            if self._count >= _ENOUGH and self._count % _REFRESH == 0:
                known = self._recent[: min(self._count, _WINDOW)]
                self._late = float(np.quantile(known, self._quantile))

    @property
    def late(self) -> float | None:
        """After how many seconds a request is late; None while too few are known."""
        return self._late

"""What the packaging process counts."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

FIELDS = (
    "packages_built",
    "package_reads",
    "package_bytes",
    "packages_lost",
    "repack_reads",
    "rebuild_reads",
)
"""Packages that were built; those read for the cache, and the bytes of their samples; those found
missing, damaged or of another data set; those read to be repacked; samples read from the source
to build packages."""


class Totals:
    """Sums of :data:`FIELDS`, written to the memory of every rank. Safe in any thread.

    They go on from the largest that a rank brings: a process that is started again has
    forgotten what its predecessor counted, and the ranks have not.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(len(FIELDS))
        self._outlets: list[NDArray[np.float64]] = []
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to the named fields."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[FIELDS.index(name)] += amount
            self._write()

    def join(self, outlet: NDArray[np.float64]) -> None:
        """Write to ``outlet`` (``f64[len(FIELDS)]``) too from now on."""
        with self._lock:
            np.maximum(self._sums, outlet, out=self._sums)
            self._outlets.append(outlet)
            self._write()

    def leave(self, outlet: NDArray[np.float64]) -> None:
        """Write to it no more."""
        with self._lock:
            self._outlets = [other for other in self._outlets if other is not outlet]

    def _write(self) -> None:
        for outlet in self._outlets:
            outlet[:] = self._sums

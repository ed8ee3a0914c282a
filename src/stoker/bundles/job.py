"""What the packaging process is given at its start, and what all ranks see in shared memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.bundles.package import stamp_of
from stoker.node.descriptors import Handle
from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.source.remote.address import Address
from stoker.store.tier import Ids

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


class Flags:
    """``u8[N]`` in the memory of every rank: 1 at what a package brought. Safe in any thread."""

    def __init__(self, num_samples: int) -> None:
        self._own = np.zeros(num_samples, np.uint8)
        self._outlets: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def set(self, ids: Ids) -> None:
        """Mark these as brought by a package."""
        self._write(ids, 1)

    def clear(self, ids: Ids) -> None:
        """Unmark these: they have left, or are cached for another reason."""
        self._write(ids, 0)

    @property
    def ids(self) -> Ids:
        """The samples that are flagged, ``u32[n]``."""
        return np.flatnonzero(self._own).astype(np.uint32)

    def join(self, outlet: NDArray[np.uint8]) -> None:
        """Write to ``outlet`` (``u8[N]``) too from now on, and copy its marks."""
        with self._lock:
            # What a predecessor of this process brought is there still.
            np.maximum(self._own, outlet, out=self._own)
            self._outlets.append(outlet)
            for other in self._outlets:
                other[:] = self._own

    def leave(self, outlet: NDArray[np.uint8]) -> None:
        """Stop writing to it."""
        with self._lock:
            self._outlets = [other for other in self._outlets if other is not outlet]

    def _write(self, ids: Ids, value: int) -> None:
        with self._lock:
            self._own[ids] = value
            for outlet in self._outlets:
                outlet[ids] = value


class Totals:
    """Sums of :data:`FIELDS`, written to the memory of every rank. Safe in any thread.

    They continue from the largest that a rank brings: a process that is started again has
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
        """Stop writing to it."""
        with self._lock:
            self._outlets = [other for other in self._outlets if other is not outlet]

    def _write(self) -> None:
        for outlet in self._outlets:
            outlet[:] = self._sums


@dataclass(frozen=True)
class Job:
    """The samples to pack, and where packages and samples go."""

    source: Source
    arena: Handle
    """The cache, of whose region :attr:`region` packages are for."""
    region: str
    low: int
    """What the ranks write for samples of low importance into the array of places."""
    served: SharedArray
    """``u32[N]``: the stamp of the latest epoch in which a sample was served."""
    location: Path | Address
    """Where packages are kept."""
    is_private: bool
    """The location is a directory that goes with the process."""
    owner: str
    """Tells packages of this job and node from those of others in the same location."""
    min_bytes: int
    seed: int
    holder: str
    """Tells this job on this node from any other, in hexadecimal digits; new in every run."""

    @property
    def group(self) -> str:
        """What the names of this job's packages begin with."""
        return f"{stamp_of(self.source.fingerprint, len(self.source)).hex()[:16]}-{self.owner}"

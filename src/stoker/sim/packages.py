"""Packaging in the simulator: the production's workshop, at work whenever a batch is over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.bundles import Packaging
from stoker.bundles.depot import Pieces
from stoker.bundles.job import FIELDS, Flags, Job, Totals
from stoker.bundles.package_loader import Loaded
from stoker.bundles.workshop import Epoch, Workshop
from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.store.arena import Arena


class MemoryDepot:
    """Packages in memory; see :class:`~stoker.bundles.depot.Depot`. For one thread."""

    def __init__(self) -> None:
        self._packages: dict[str, bytes] = {}

    def names(self) -> list[str]:
        """Return the packages."""
        return list(self._packages)

    def publish(self, name: str, pieces: Pieces) -> None:
        """Put a package there."""
        self._packages[name] = b"".join(pieces)

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        """Return a package, or its first bytes; FileNotFoundError if it is not there."""
        if name not in self._packages:
            raise FileNotFoundError(name)
        view = memoryview(self._packages[name])
        return view if num_bytes < 0 else view[:num_bytes]

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages; those that are not there are passed over."""
        for name in names:
            self._packages.pop(name, None)

    def close(self) -> None:
        """Forget all packages."""
        self._packages.clear()


class Packages:
    """Packs and loads without delay: an upper bound of what the packaging process achieves.

    Arguments are those of :class:`~stoker.bundles.Packager`. Used by one thread.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        served: SharedArray,
        packaged: SharedArray,
        settings: Packaging,
        *,
        low: int,
        region: str,
        seed: int,
    ) -> None:
        self._low = low
        self._totals = np.zeros(len(FIELDS))
        flags, totals = Flags(len(source)), Totals()
        flags.join(packaged.array)
        totals.join(self._totals)
        job = Job(
            source,
            arena.handle,
            region,
            low,
            served,
            Path(),  # nothing is written: packages are in memory
            True,
            "0",
            settings.min_bytes,
            seed,
            "0",
        )
        self._workshop = Workshop(job, arena, MemoryDepot(), flags, totals)
        self._missed = np.zeros(len(source), np.bool_)

    def begin_epoch(self, epoch: int, stamp: int, places: NDArray[np.uint8]) -> None:
        """Repack for ``epoch``, from which on ``stamp`` marks what is served."""
        low = places == self._low
        self._workshop.begin(Epoch(epoch, stamp, low), self._missed & low)
        self._missed = np.zeros_like(self._missed)
        self.work()

    def note_missed(self, ids: NDArray[np.uint32]) -> None:
        """Note samples ``u32[n]`` that were asked for and not cached."""
        self._missed[ids] = True

    def work(self) -> None:
        """Build and load as long as there is room for a package."""
        while True:
            built = self._workshop.build()
            loaded = self._workshop.load()
            if not built and loaded in (None, Loaded.NO_ROOM, Loaded.TOO_LARGE):
                return

    def stats(self) -> dict[str, int]:
        """Return the counts of :meth:`stoker.bundles.Packager.stats`."""
        return dict(zip(FIELDS, self._totals.astype(np.int64).tolist(), strict=True))

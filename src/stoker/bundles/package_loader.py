"""Brings packages into the cache, one after the other, in place of samples already served."""

from __future__ import annotations

import time
from enum import Enum

import numpy as np

from stoker.bundles.builder import Catalogue, read_package
from stoker.bundles.depot import Depot
from stoker.bundles.job import Flags, Totals
from stoker.bundles.package import Package, stamp_of_files
from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.source.packed import pick
from stoker.store.arena import Arena
from stoker.store.tier import Ids, Mask

_FRESH = 0.5  # seconds for which a look at the whole region holds


class Loaded(Enum):
    """What became of a package that was to be loaded."""

    DONE = "done"
    """It was read, and its samples are in the cache."""
    NOT_NEEDED = "not needed"
    """All its samples were served already or are in the cache: it was not read."""
    NO_ROOM = "no room"
    """Too few samples of its region were served yet: try again later."""
    TOO_LARGE = "too large"
    """The region has become smaller than the package."""
    LOST = "lost"
    """It is not there any more, or damaged; it is forgotten."""


class PackageLoader:
    """Loads packages into ``region``; belongs to one thread.

    A sample leaves only for one that is coming, and only when it was served in this epoch, as
    the stamps in ``served`` (``u32[N]``) say, or is not of low importance any more. Where the
    region holds a single package, that is when all its samples were served (iCache, HPCA'23).
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        region: str,
        served: SharedArray,
        depot: Depot,
        catalogue: Catalogue,
        flags: Flags,
        totals: Totals,
    ) -> None:
        self._sizes, self._num_samples = source.sizes, len(source)
        self._stamp = stamp_of_files(source)
        self._arena, self._region = arena, region
        self._served = served.array
        self._depot, self._catalogue, self._flags, self._totals = depot, catalogue, flags, totals
        self._listed, self._list_until = np.empty(0, np.uint32), 0.0

    def load(self, number: int, low: Mask, epoch_stamp: int) -> Loaded:
        """Load a package of the catalogue, as far as its samples are of use.

        These are of low importance by ``low`` (``bool[N]``), not served since ``epoch_stamp``, and
        not cached. Raises OSError when the depot fails.
        """
        ids = self._catalogue.ids(number)
        wanted = ids[low[ids] & ~self._is_served(ids, epoch_stamp) & ~self._arena.contains(ids)]
        if not wanted.size:
            return Loaded.NOT_NEEDED
        needed = int(self._sizes[wanted].sum())
        leaving, room = self._room(needed, low, epoch_stamp)
        if room < needed:
            budget = int(self._arena.stats()["regions"][self._region]["budget"])
            return Loaded.TOO_LARGE if needed > budget else Loaded.NO_ROOM
        package = self._read(number, ids)
        if package is None:
            return Loaded.LOST
        self._arena.discard_from(self._region, leaving)
        self._list_until = 0.0
        self._forget_gone()
        self._put(package, wanted)
        return Loaded.DONE

    def _is_served(self, ids: Ids, epoch_stamp: int) -> Mask:
        served: Mask = self._served[ids] >= epoch_stamp
        return served

    def _room(self, needed: int, low: Mask, epoch_stamp: int) -> tuple[Ids, int]:
        """Return which samples should leave for ``needed`` bytes, and the room that makes."""
        region = self._arena.stats()["regions"][self._region]
        free = int(region["budget"]) - int(region["bytes"])
        if free >= needed:
            return np.empty(0, np.uint32), free
        held = self._list(int(region["entries"]))
        over = held[self._is_served(held, epoch_stamp) | ~low[held]]
        room = free + np.cumsum(self._sizes[over])
        enough = int(np.searchsorted(room, needed)) + 1
        return over[:enough], int(room[:enough][-1]) if len(over) else free

    def _list(self, entries: int) -> Ids:
        """Return what lies in the region, as it was a moment ago if it has as many ``entries``.

        A lookup scans all samples, and room is requested many times per second.
        """
        now = time.monotonic()
        if len(self._listed) != entries or now >= self._list_until:
            self._listed, self._list_until = self._arena.list(self._region), now + _FRESH
        return self._listed

    def _read(self, number: int, ids: Ids) -> Package | None:
        name = self._catalogue.name(number)
        package = None
        if name is not None:
            package = read_package(self._depot, name, ids, self._stamp, self._num_samples)
        if package is None:
            self._depot.remove(self._catalogue.remove([number]))
            self._totals.add(packages_lost=1)
            return None
        self._totals.add(package_reads=1, package_bytes=len(package.samples.data))
        return package

    def _put(self, package: Package, wanted: Ids) -> None:
        left = wanted[self._arena.claim(wanted)]
        try:
            index = np.flatnonzero(np.isin(package.ids, left))
            own, samples = package.ids[index], pick(package.samples, index)
            self._flags.set(own)  # before a worker can be served one of them
            admitted = self._arena.put_many(own, tuple(samples), None, self._region)
            left = own[~admitted]
            self._flags.clear(left)
        finally:
            if left.size:
                self._arena.abandon(left)

    def _forget_gone(self) -> None:
        """Take back the flags of samples that have left the cache."""
        flagged = self._flags.ids
        self._flags.clear(flagged[~self._arena.contains(flagged)])

"""Builds packages: gathers samples from where they are cheapest to have, and stores them."""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SegmentError, SourceUnavailable
from stoker.packaging.catalogue import Catalogue
from stoker.packaging.depot import Depot, new_name
from stoker.packaging.package import Package, decode, encode, stamp_of_files
from stoker.packaging.packer import mixed_packages
from stoker.packaging.totals import Totals
from stoker.source.base import Source, read_whole
from stoker.source.packed import Packed, gather
from stoker.store.arena import Arena
from stoker.store.tier import Ids

log = logging.getLogger("stoker.packaging")

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Builder:
    """Builds one package at a time; belongs to one thread.

    Samples come from the cache, else from existing packages, which are read whole and kept
    until enough others were read, else from the source, in one read for all.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        depot: Depot,
        catalogue: Catalogue,
        totals: Totals,
        group: str,
        min_bytes: int,
    ) -> None:
        self._source, self._arena, self._depot = source, arena, depot
        self._catalogue, self._totals, self._group = catalogue, totals, group
        self._stamp = stamp_of_files(source)
        self._open: OrderedDict[int, Package] = OrderedDict()
        # A package may take from two groups that are mixed apart from each other.
        self._most_open = 2 * mixed_packages(min_bytes)
        self.unreadable = np.zeros(len(source), np.bool_)
        """``bool[N]``: samples that the source does not give."""

    def build(self, ids: Ids) -> tuple[int, NDArray[np.int64]] | None:
        """Build, store and note a package of ``ids`` (``u32[n]``, distinct).

        Returns its number in the catalogue, and the numbers of those it took samples from; None
        when none of its samples can be had. Raises OSError when the depot fails, and what the
        source raises; then nothing has changed.
        """
        before = np.unique(self._catalogue.home(ids))
        package = self._gather(ids)
        if not package.ids.size:
            return None
        name = new_name(self._group)
        self._publish(name, package)
        self._totals.add(packages_built=1)
        return self._catalogue.add(name, package.ids), before[before >= 0]

    def _publish(self, name: str, package: Package) -> None:
        pieces = encode(package, self._stamp)
        try:
            self._depot.publish(name, pieces)
        except OSError as error:
            if error.errno not in _FULL or not self._make_room(sum(map(len, pieces))):
                raise
            self._depot.publish(name, pieces)

    def _make_room(self, num_bytes: int) -> bool:
        """Remove the oldest packages; their samples can be read again. False if there are none."""
        sizes = self._source.sizes
        victims = []
        for number in self._catalogue.numbers():
            if num_bytes <= 0:
                break
            victims.append(number)
            num_bytes -= int(sizes[self._catalogue.ids(number)].sum())
        self._depot.remove(self._catalogue.remove(victims))
        return bool(victims)

    def _gather(self, ids: Ids) -> Package:
        """Return the samples; those that the source does not give are left out."""
        data, offsets, found = self._arena.get_many(ids)
        parts = [Packed(data, offsets)]
        part = np.where(found, 0, -1)
        index = np.arange(len(ids))
        self._from_packages(ids, parts, part, index)
        self._from_source(ids, parts, part, index)
        had = part >= 0
        return Package(ids[had], gather(parts, part[had], index[had]))

    def _from_packages(
        self,
        ids: Ids,
        parts: list[Packed],
        part: NDArray[np.int64],
        index: NDArray[np.int64],
    ) -> None:
        home = self._catalogue.home(ids)
        for number in np.unique(home[(part < 0) & (home >= 0)]).tolist():
            package = self._package(number)
            if package is None:
                continue
            mine = np.flatnonzero((part < 0) & (home == number))
            order = np.argsort(package.ids)
            places = np.searchsorted(package.ids, ids[mine], sorter=order)
            part[mine] = len(parts)
            index[mine] = order[places]
            parts.append(package.samples)

    def _package(self, number: int) -> Package | None:
        """Return an existing package, None if it is lost; it is then forgotten."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        name = self._catalogue.name(number)
        if name is None:
            return None
        package = read_package(
            self._depot, name, self._catalogue.ids(number), self._stamp, len(self._source)
        )
        if package is None:
            self._depot.remove(self._catalogue.remove([number]))
            self._totals.add(packages_lost=1)
            return None
        self._totals.add(repack_reads=1)
        self._open[number] = package
        if len(self._open) > self._most_open:
            self._open.popitem(last=False)
        return package

    def _from_source(
        self,
        ids: Ids,
        parts: list[Packed],
        part: NDArray[np.int64],
        index: NDArray[np.int64],
    ) -> None:
        # In order of ids, which is that of the storage, so that neighbours come in one request.
        lacking = np.flatnonzero(part < 0)
        lacking = lacking[np.argsort(ids[lacking])]
        if not lacking.size:
            return
        self._totals.add(rebuild_reads=len(lacking))
        data, offsets, errors = read_whole(self._source, ids[lacking])
        for place, error in errors.items():
            if isinstance(error, SourceUnavailable):
                raise error
            log.info("left out of packages: %s", error)
            self.unreadable[ids[lacking[place]]] = True
        good = np.setdiff1d(np.arange(len(lacking)), list(errors))
        part[lacking[good]] = len(parts)
        index[lacking[good]] = good
        parts.append(Packed(data, offsets))


def read_package(
    depot: Depot, name: str, ids: Ids, stamp: bytes, num_samples: int
) -> Package | None:
    """Return a package in one read of the depot; None if it is not what was put there."""
    try:
        package = decode(depot.read(name), stamp, num_samples)
        if not np.array_equal(package.ids, ids):
            raise SegmentError("a package holds other samples than it did")
    except (FileNotFoundError, SegmentError) as error:
        log.info("package %s is lost: %s", name, error)
        return None
    return package

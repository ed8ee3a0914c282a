"""Which samples go into which package, and packages built of them."""

from __future__ import annotations

import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.bundles.depot import Depot, new_name
from stoker.bundles.package import Package, decode, encode, stamp_of_files
from stoker.bundles.packager import Totals
from stoker.errors import SegmentError, SourceUnavailable
from stoker.shared import in_parts, scratch
from stoker.source.base import Source, read_whole
from stoker.source.packed import Packed, gather
from stoker.store.arena import Arena
from stoker.store.tier import Ids, Mask

_MIXED_BYTES = 32 << 20
_MOST_MIXED = 16
log = logging.getLogger("stoker.bundles")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Catalogue:
    """The packages of one depot, by number, in the order in which they were made.

    A sample is *at home* in the latest package that holds it. Safe in any thread.
    """

    def __init__(self, num_samples: int) -> None:
        # One more than the number of the package, 0: in none. Without packages it takes no memory.
        self._home: NDArray[np.uint32] = scratch(num_samples, np.uint32)
        self._packages: dict[int, tuple[str, Ids]] = {}
        self._examples: dict[int, int] = {}  # of each package one for which it was useful last
        self._next = 0
        self._lock = threading.Lock()

    def add(self, name: str, ids: Ids) -> int:
        """Note a package with ``ids`` (``u32[n]``), which are at home there, and number it."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._packages[number] = name, ids
            core.write(self._home, ids, number + 1)
            return number

    def remove(self, numbers: Iterable[int]) -> list[str]:
        """Forget packages, and return the names of those that were there."""
        names = []
        with self._lock:
            for number in numbers:
                if number in self._packages:
                    name, ids = self._packages.pop(number)
                    self._examples.pop(number, None)
                    self._home[ids[core.look_up(self._home, ids) == number + 1]] = 0
                    names.append(name)
        return names

    def name(self, number: int) -> str | None:
        """Return the name of a package, None if it no longer exists."""
        with self._lock:
            return self._packages.get(number, (None,))[0]

    def ids(self, number: int) -> Ids:
        """Return the samples in a package, ``u32[n]``; none if it no longer exists."""
        with self._lock:
            found = self._packages.get(number)
            return np.empty(0, np.uint32) if found is None else found[1]

    def home(self, ids: Ids) -> NDArray[np.uint32]:
        """Return one more than the number of each sample's package, 0 where it is in none."""
        return core.look_up(self._home, ids)

    def numbers(self) -> list[int]:
        """Return the numbers of all packages, the oldest first."""
        with self._lock:
            return list(self._packages)

    @property
    def homes(self) -> NDArray[np.uint32]:
        """What :meth:`home` returns of all samples, ``u32[N]``, read-only and as it changes."""
        homes = self._home.view()
        homes.flags.writeable = False
        return homes

    def useless(self, low: Mask, numbers: Iterable[int]) -> list[int]:
        """Return those of ``numbers`` where no sample of ``low`` (``bool[N]``) is at home."""
        with self._lock:
            there = [number for number in numbers if number in self._packages]
            return [number for number in there if not self._is_useful(low, number)]

    def _is_useful(self, low: Mask, number: int) -> bool:
        known = self._examples.get(number)
        if known is not None and low[known] and self._home[known] == number + 1:
            return True
        ids = self._packages[number][1]
        first = core.find_first(self._home, number + 1, low, ids)
        if first is not None:
            self._examples[number] = int(ids[first])
        return first is not None


def mixed_packages(min_bytes: int) -> int:
    """Return how many packages have their samples mixed into new ones.

    Twice as many are in memory at the same time.
    """
    return int(np.clip(_MIXED_BYTES // min_bytes, 2, _MOST_MIXED))


def pack(
    low: Mask,
    missed: Mask,
    homes: NDArray[np.uint32],
    sizes: NDArray[np.int64],
    min_bytes: int,
    rng: np.random.Generator,
) -> list[Ids]:
    """Return the packages to make, each as its ids ``u32[n]``, in the order of their use.

    ``low`` (``bool[N]``) says which samples are of low importance: all of these are packed, no
    others. First come those that were ``missed`` (``bool[N]``), then those of packages that exist,
    which ``homes`` (``u32[N]``) names, 0 for none; then the rest (iCache, HPCA'23, "Dynamic
    packaging"). Each part is in random order, except that samples of existing packages are only
    mixed with those of a few others (:func:`mixed_packages`, chosen at random), so that each
    package need be read but once or twice.

    Each package has ``min_bytes`` at least, by ``sizes`` (``i64[N]``), and less than that plus its
    last sample; where all of ``low`` together have less, there is a single one. Together they
    hold each sample once, except that the last package is padded with random samples of the
    one before. Pure: the same arguments and state of ``rng`` give the same packages.
    """
    ids: Ids = scratch(int(np.count_nonzero(low)), np.uint32)
    filled = 0
    for part in in_parts(len(low)):
        found = np.flatnonzero(low[part])
        ids[filled : filled + len(found)] = found + part.start
        filled += len(found)
    return _cut(_ordered(ids, missed, homes, mixed_packages(min_bytes), rng), sizes, min_bytes, rng)


def _ordered(
    ids: Ids, missed: Mask, homes: NDArray[np.uint32], mixed: int, rng: np.random.Generator
) -> Ids:
    """Return ``ids`` in the order in which to pack them, their own memory; see :func:`pack`."""
    existing = core.distinct(core.look_up(homes, ids))
    existing = existing[existing > 0]
    groups = -(-len(existing) // mixed)
    # Those that were missed and are in no package come first; the largest is in none either.
    kind = np.min_scalar_type(2 * groups + 1)
    group = np.full(int(existing.max(initial=0)) + 1, groups, kind)
    group[existing] = rng.permutation(len(existing)) // mixed
    with rng.bit_generator.lock:  # as rng.shuffle(), in half the time
        core.shuffle(ids, rng.bit_generator.capsule, 0)
    turns = scratch(len(ids), kind)
    for part in in_parts(len(ids)):
        own = group.take(homes.take(ids[part]))
        first = np.where(own == groups, 0, 1 + own)
        turns[part] = np.where(missed.take(ids[part]), first, groups + 1 + own)
    order = np.argsort(turns, kind="stable")
    return ids.take(order)


def _cut(ids: Ids, sizes: NDArray[np.int64], min_bytes: int, rng: np.random.Generator) -> list[Ids]:
    ends: NDArray[np.int64] = scratch(len(ids), np.int64)
    for part in in_parts(len(ids)):
        ends[part] = sizes[ids[part]]
    np.cumsum(ends, out=ends)
    cuts: list[int] = []
    begin = before = 0
    while begin < len(ids) and ends[-1] - before >= min_bytes:
        begin = int(np.searchsorted(ends, before + min_bytes)) + 1
        before = int(ends[begin - 1])
        cuts.append(begin)
    if not cuts:
        return [ids] if ids.size else []
    packages = np.split(ids, cuts)
    rest = packages.pop()
    if rest.size:
        others = rng.permutation(packages[-1])
        lacking = min_bytes - int(sizes[rest].sum())
        filled = int(np.searchsorted(np.cumsum(sizes[others]), lacking)) + 1
        packages.append(np.concatenate([rest, others[:filled]]))
    return packages


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
        self.unreadable: Mask = scratch(len(source), np.bool_)
        """``bool[N]``: samples that the source does not give."""

    def build(self, ids: Ids) -> tuple[int, list[int]] | None:
        """Build, store and note a package of ``ids`` (``u32[n]``, distinct).

        Returns its number in the catalogue, and the numbers of those it took samples from; None
        when none of its samples is available. Raises OSError when the depot fails, and what the
        source raises; then nothing has changed.
        """
        home = self._catalogue.home(ids)
        package = self._gather(ids, home)
        if not package.ids.size:
            return None
        name = self._publish(package)
        self._totals.add(packages_built=1)
        return self._catalogue.add(name, package.ids), numbers_in(home)

    def read(self, number: int) -> Package | None:
        """Return a package of the catalogue in one read of the depot; safe in any thread.

        None if it is lost, and from then on forgotten. Raises OSError when the depot fails.
        """
        name, package = self._catalogue.name(number), None
        if name is not None:
            ids = self._catalogue.ids(number)
            package = read_package(self._depot, name, ids, self._stamp, len(self._source))
        if package is None:
            self._depot.remove(self._catalogue.remove([number]))
            self._totals.add(packages_lost=1)
        return package

    def _publish(self, package: Package) -> str:
        """Store a package, and return its name."""
        name, pieces = new_name(self._group), encode(package, self._stamp)
        try:
            self._depot.publish(name, pieces)
        except OSError as error:
            if error.errno not in _FULL or not self._make_room(sum(map(len, pieces))):
                raise
            self._depot.publish(name, pieces)
        return name

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

    def _gather(self, ids: Ids, home: NDArray[np.uint32]) -> Package:
        """Return the samples, which are in packages ``home``, see :meth:`Catalogue.home`.

        Those that the source does not give are left out.
        """
        data, offsets, found = self._arena.get_many(ids)
        parts = [Packed(data, offsets)]
        part = np.where(found, 0, -1)
        index = np.arange(len(ids))
        self._from_packages(ids, home, parts, part, index)
        self._from_source(ids, parts, part, index)
        had = part >= 0
        return Package(ids[had], gather(parts, part[had], index[had]))

    def _from_packages(
        self,
        ids: Ids,
        home: NDArray[np.uint32],
        parts: list[Packed],
        part: NDArray[np.int64],
        index: NDArray[np.int64],
    ) -> None:
        for number in numbers_in(home[part < 0]):
            package = self._opened(number)
            if package is None:
                continue
            mine = np.flatnonzero((part < 0) & (home == number + 1))
            order = np.argsort(package.ids)
            found = np.searchsorted(package.ids, ids[mine], sorter=order)
            part[mine] = len(parts)
            index[mine] = order[found]
            parts.append(package.samples)

    def _opened(self, number: int) -> Package | None:
        """Return an existing package, which is kept for a while; None if it is lost."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if self._catalogue.name(number) is None or (package := self.read(number)) is None:
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
        for row, error in errors.items():
            if isinstance(error, SourceUnavailable):
                raise error
            log.info("left out of packages: %s", error)
            self.unreadable[ids[lacking[row]]] = True
        good = np.setdiff1d(np.arange(len(lacking)), list(errors))
        part[lacking[good]] = len(parts)
        index[lacking[good]] = good
        parts.append(Packed(data, offsets))


def numbers_in(home: NDArray[np.uint32]) -> list[int]:
    """Return the packages that samples are in by :meth:`Catalogue.home`, each once, ascending."""
    found = core.distinct(home)
    numbers: list[int] = (found[found > 0] - 1).tolist()
    return numbers


def read_package(
    depot: Depot, name: str, ids: Ids, stamp: bytes, num_samples: int
) -> Package | None:
    """Return a package in one read of the depot; None if it is not the one stored there."""
    try:
        package = decode(depot.read(name), stamp, num_samples)
        if not np.array_equal(package.ids, ids):
            raise SegmentError("a package holds other samples than it did")
    except (FileNotFoundError, SegmentError) as error:
        log.info("package %s is lost: %s", name, error)
        return None
    return package

"""What the packaging process does in an epoch: repack, and load what was packed into the cache."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.bundles.builder import Builder, Catalogue, pack
from stoker.bundles.depot import Depot
from stoker.bundles.package import LEAST_HEAD, Package, decode_ids, head_bytes, stamp_of_files
from stoker.bundles.packager import Flags, Job, Totals
from stoker.errors import SegmentError
from stoker.shared import SharedArray, in_parts, scratch
from stoker.source.base import Source
from stoker.source.packed import pick
from stoker.store.arena import Arena
from stoker.store.tier import Ids, Mask

log = logging.getLogger("stoker.bundles")

_FRESH = 0.5  # seconds for which a look at the whole region holds
_AHEAD = 4  # packages that lie ready to be loaded
_HEAD = 64 << 10  # bytes that most heads fit into


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
    With ``is_told``, :meth:`note_served` says what was served, which is looked for only once in an
    epoch, and nothing but this changes the region within one.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        region: str,
        served: SharedArray,
        builder: Builder,
        catalogue: Catalogue,
        flags: Flags,
        totals: Totals,
        *,
        is_told: bool = False,
    ) -> None:
        self._sizes = source.sizes
        self._arena, self._region = arena, region
        self._served = served.array
        self._builder, self._catalogue, self._flags = builder, catalogue, flags
        self._totals = totals
        self._is_told = is_told
        self._epoch_stamp = 0
        self._over: Ids | None = None  # those of the region that may leave, once it was looked for
        self._listed, self._list_until = np.empty(0, np.uint32), 0.0
        self.lacking = 0
        """Bytes of its region that must be served before what had no room last can have it."""

    def load(self, number: int, low: Mask, epoch_stamp: int) -> Loaded:
        """Load a package of the catalogue, as far as its samples are of use.

        These are not served since ``epoch_stamp``, and not cached; all in a package of this epoch
        are of low importance by ``low`` (``bool[N]``). Raises OSError when the depot fails.
        """
        if self._epoch_stamp != epoch_stamp:
            self._forget_gone()
            self._epoch_stamp, self._over, self._list_until = epoch_stamp, None, 0.0
        ids = self._catalogue.ids(number)
        wanted = self._arena.find_lacking(ids, self._served, epoch_stamp)
        if not wanted.size:
            return Loaded.NOT_NEEDED
        needed = int(self._sizes[ids[wanted]].sum())
        is_lent = self._arena.limit_bytes < self._arena.capacity_bytes  # and comes back
        region = self._arena.region_stats(self._region)
        over = self._may_leave(region["entries"], low, epoch_stamp)
        lacking = needed - (region["budget"] - region["bytes"])
        freed = self._sizes[over].cumsum()
        most = int(freed[-1]) if freed.size else 0
        if most < lacking:
            self.lacking = lacking - most
            fits = is_lent or needed <= region["budget"]
            return Loaded.NO_ROOM if fits else Loaded.TOO_LARGE
        package = self._builder.read(number)
        if package is None:
            return Loaded.LOST
        self._totals.add(package_reads=1, package_bytes=len(package.samples.data))
        leaving = int(freed.searchsorted(lacking)) + 1 if lacking > 0 else 0
        self._let_go(over[:leaving])
        self._over, self._list_until = over[leaving:], 0.0
        self._put(package, wanted)
        return Loaded.DONE

    def note_served(self, ids: Ids) -> None:
        """Note samples ``u32[n]`` of low importance that the cache served, once in the epoch."""
        if self._over is not None:
            there = self._arena.copies(ids, self._region) > 0
            self._over = np.concatenate((self._over, ids[there]))

    def _may_leave(self, entries: int, low: Mask, epoch_stamp: int) -> Ids:
        """Return those of the region, which has so many ``entries``, that may leave."""
        if self._over is None or not self._is_told:
            held = self._list(entries)
            self._over = held[core.find_marked(self._served, low, held, epoch_stamp)]
        return self._over

    def _list(self, entries: int) -> Ids:
        """Return what lies in the region, as it was a moment ago if it has as many ``entries``.

        A lookup scans all samples, and room is requested many times per second.
        """
        now = time.monotonic()
        if len(self._listed) != entries or now >= self._list_until:
            self._listed, self._list_until = self._arena.list(self._region), now + _FRESH
        return self._listed

    def _let_go(self, ids: Ids) -> None:
        self._arena.discard_from(self._region, ids)
        self._flags.clear(ids[~self._arena.contains(ids)])

    def _put(self, package: Package, index: NDArray[np.int64]) -> None:
        index = index[self._arena.claim(package.ids[index])]
        left = own = package.ids[index]
        try:
            self._flags.set(own)  # before a worker can be served one of them
            samples = tuple(pick(package.samples, index))
            admitted = self._arena.put_many(own, samples, None, self._region)
            left = own[~admitted]
        finally:
            if left.size:
                self._flags.clear(left)
                self._arena.abandon(left)

    def _forget_gone(self) -> None:
        """Take back the flags of all samples that have left the cache."""
        flagged = self._flags.ids
        self._flags.clear(flagged[~self._arena.contains(flagged)])


@dataclass(frozen=True, eq=False)
class Epoch:
    """One epoch, as the ranks announce it."""

    number: int
    stamp: int
    """What ``served`` says of samples that were served in it, or more."""
    low: Mask
    """``bool[N]``: samples of low importance."""


class Workshop:
    """Builds packages only as far ahead as they are loaded, in two threads.

    :meth:`build` belongs to one of them and :meth:`load` to the other; both do one step and
    return whether there was anything to do. :meth:`begin` may be called at any time.
    ``is_told``: as for :class:`PackageLoader`. ``builder`` is the kind of builder.
    """

    def __init__(
        self,
        job: Job,
        arena: Arena,
        depot: Depot,
        flags: Flags,
        totals: Totals,
        *,
        is_told: bool = False,
        builder: type[Builder] = Builder,
    ) -> None:
        self._job, self._depot, self._flags = job, depot, flags
        self._num_samples = len(job.source)
        self._catalogue = catalogue = Catalogue(self._num_samples)
        self._builder = builder(
            job.source, arena, depot, catalogue, totals, job.group, job.min_bytes
        )
        self._loader = PackageLoader(
            *(job.source, arena, job.region, job.served, self._builder, catalogue, flags, totals),
            is_told=is_told,
        )
        self._lock = threading.Lock()
        self._epoch: Epoch | None = None
        self._to_begin: tuple[Epoch, Mask] | None = None
        self._to_build: deque[Ids] = deque()
        self._to_load: deque[int] = deque()

    @property
    def lacking(self) -> int:
        """Bytes of the region that must be served before :meth:`load` can load what it could not.

        After :data:`Loaded.NO_ROOM`; for the thread that loads.
        """
        return self._loader.lacking

    def note_served(self, ids: Ids) -> None:
        """Note what was served, with ``is_told``; see :meth:`PackageLoader.note_served`."""
        self._loader.note_served(ids)

    def adopt(self) -> None:
        """Take over the packages that an earlier run left; useless ones are removed."""
        stamp = stamp_of_files(self._job.source)
        for name in self._depot.names():
            try:
                head = self._depot.read(name, _HEAD)
                if len(head) >= LEAST_HEAD and head_bytes(head) > len(head):
                    head = self._depot.read(name, head_bytes(head))
                self._catalogue.add(name, decode_ids(head, stamp, self._num_samples))
            except (FileNotFoundError, SegmentError) as error:
                log.info("package %s is lost: %s", name, error)
                self._depot.remove([name])

    def begin(self, epoch: Epoch, missed: Mask) -> None:
        """Repack for ``epoch`` at the next :meth:`build`.

        ``missed`` (``bool[N]``): samples of low importance that were asked for and not cached.
        """
        with self._lock:
            self._to_begin = epoch, missed
            self._to_build.clear()
            self._to_load.clear()

    def build(self) -> bool:
        """Repack if an epoch begins, else build the next package if it is time for it.

        Raises OSError when the depot fails, and what the source raises; nothing is lost then.
        """
        with self._lock:
            beginning = self._to_begin
        if beginning is not None:
            self._repack(*beginning)
            return True
        with self._lock:
            epoch = self._epoch
            if epoch is None or not self._to_build or len(self._to_load) >= _AHEAD:
                return False
            ids = self._to_build.popleft()
        try:
            built = self._builder.build(ids)
        except BaseException:
            with self._lock:
                if self._is_current(epoch):
                    self._to_build.appendleft(ids)
            raise
        if built is not None:
            with self._lock:
                if self._is_current(epoch):
                    self._to_load.append(built[0])
            self._remove_useless(epoch.low, built[1])
        return True

    def load(self) -> Loaded | None:
        """Load the next package that was built; None if there is none, or not in this epoch.

        Raises OSError when the depot fails.
        """
        with self._lock:
            epoch = self._epoch
            if epoch is None or not self._to_load:
                return None
            number = self._to_load[0]
        ids = self._catalogue.ids(number)
        loaded = self._loader.load(number, epoch.low, epoch.stamp)
        if loaded in (Loaded.NO_ROOM, Loaded.TOO_LARGE):
            return loaded
        with self._lock:
            if self._is_current(epoch):
                self._to_load.popleft()
                if loaded is Loaded.LOST and ids.size:
                    self._to_build.appendleft(ids)
        return loaded

    def _is_current(self, epoch: Epoch) -> bool:
        """Whether no other epoch has begun since; the lock is held."""
        return self._epoch is epoch and self._to_begin is None

    def _repack(self, epoch: Epoch, missed: Mask) -> None:
        served = self._job.served.array
        if self._epoch is not None:
            # Asked for and not there at first, but served later on, in place of another.
            missed = _still(missed, served, self._epoch.stamp)
        flagged = self._flags.ids
        self._flags.clear(flagged[~epoch.low[flagged]])
        self._remove_useless(epoch.low, self._catalogue.numbers())
        due = _still(epoch.low, served, epoch.stamp)
        np.greater(due, self._builder.unreadable, out=due)
        packages = pack(
            due,
            missed,
            self._catalogue.homes,
            self._job.source.sizes,
            self._job.min_bytes,
            np.random.default_rng([self._job.seed, epoch.number]),
        )
        with self._lock:
            if self._to_begin is not None and self._to_begin[0] is epoch:
                self._to_begin = None
                self._epoch = epoch
                self._to_build = deque(packages)

    def _remove_useless(self, low: Mask, numbers: list[int]) -> None:
        with self._lock:
            waiting = set(self._to_load)
        useless = [n for n in self._catalogue.useless(low, numbers) if n not in waiting]
        self._depot.remove(self._catalogue.remove(useless))


def _still(chosen: Mask, served: NDArray[np.uint32], stamp: int) -> Mask:
    """Return those of ``chosen`` (``bool[N]``) that were not ``served`` (``u32[N]``) since."""
    still: Mask = scratch(len(chosen), np.bool_)
    for part in in_parts(len(chosen)):
        if chosen[part].any():  # of shared memory, what is read takes up some
            np.logical_and(chosen[part], served[part] < stamp, out=still[part])
    return still

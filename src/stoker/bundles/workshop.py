"""What the packaging process does in an epoch: repack, and load what was packed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from stoker.bundles.builder import Builder, Catalogue, pack
from stoker.bundles.depot import Depot
from stoker.bundles.job import Flags, Job, Totals
from stoker.bundles.package import LEAST_HEAD, decode_ids, head_bytes, stamp_of_files
from stoker.bundles.package_loader import Loaded, PackageLoader
from stoker.errors import SegmentError
from stoker.store.arena import Arena
from stoker.store.tier import Ids, Mask

log = logging.getLogger("stoker.bundles")

_AHEAD = 4  # packages that lie ready to be loaded
_HEAD = 64 << 10  # bytes that most heads fit into


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
    """

    def __init__(self, job: Job, arena: Arena, depot: Depot, flags: Flags, totals: Totals) -> None:
        self._job, self._depot, self._flags = job, depot, flags
        self._num_samples = len(job.source)
        self._catalogue = catalogue = Catalogue(self._num_samples)
        self._builder = Builder(
            job.source, arena, depot, catalogue, totals, job.group, job.min_bytes
        )
        self._loader = PackageLoader(
            job.source, arena, job.region, job.served, depot, catalogue, flags, totals
        )
        self._lock = threading.Lock()
        self._epoch: Epoch | None = None
        self._to_begin: tuple[Epoch, Mask] | None = None
        self._to_build: deque[Ids] = deque()
        self._to_load: deque[int] = deque()

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
            self._remove_useless(epoch.low, built[1].tolist())
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
            missed = missed & (served < self._epoch.stamp)
        flagged = self._flags.ids
        self._flags.clear(flagged[~epoch.low[flagged]])
        self._remove_useless(epoch.low, self._catalogue.numbers())
        packages = pack(
            epoch.low & (served < epoch.stamp) & ~self._builder.unreadable,
            missed,
            self._catalogue.contents(),
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

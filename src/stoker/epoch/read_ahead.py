"""What is read for a rank before its workers ask, and what past the cache, as it is in memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.planner import Cursor
from stoker.epoch.rank_share import RankShare
from stoker.node.supervisor import Forerunner
from stoker.plan import Plan
from stoker.policy.base import Region
from stoker.prefetch import Prefetcher
from stoker.prefetch.prefetcher import Job
from stoker.prefetch.reading import WINDOW
from stoker.prefetch.walk import Progress
from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.source.held import MemorySource
from stoker.store.memory_tier import MemoryTier
from stoker.store.stacked import StackedTier
from stoker.store.store import Store

_SHARE = 0.05  # of the cache, which the window takes at most
_BATCHES = 4  # but where the cache is small it holds so many, and one for each worker,
_SMALL_SHARE = 0.25  # up to this share;
_OF_A_FETCHER = 8 << 20  # and on top what each further process has under way, and next;
_LEAST_BATCHES = 2  # and these of each rank in any case: what does not fit, a worker has to read

_LOOKED_AT = 32  # samples
_ENOUGH, _TOO_FEW = 0.75, 0.5  # share of them in memory: to stand aside, and to stop doing so
_INTERVAL = 0.5  # seconds between two looks within an epoch

log = logging.getLogger("stoker")


def window_bytes(
    asked: int,
    capacity: int,
    batch_bytes: float,
    num_workers: int,
    ranks_here: int,
    fetchers: int = 1,
) -> int:
    """Return the bytes that may lie ready for all ranks of this node together."""
    enough = (_BATCHES + num_workers) * ranks_here * batch_bytes + _OF_A_FETCHER * (fetchers - 1)
    enough = min(enough, capacity * _SMALL_SHARE)
    least = min(_LEAST_BATCHES * ranks_here * batch_bytes, capacity)
    return min(asked, int(max(capacity * _SHARE, enough, least)))


def with_window(regions: tuple[Region, ...], capacity: int, window: int) -> list[Region]:
    """Return the regions of a policy beside a window, as shares of both together."""
    total = capacity + window
    shares = [
        Region(**{**vars(region), "share": region.share * capacity / total}) for region in regions
    ]
    return [*shares, Region(WINDOW, window / total, order="insertion")] if window else shares


def can_prefetch(store: Store) -> bool:
    """Whether a process of its own is of use: there is a cache with a window, and a storage."""
    tier = store.tier
    return (
        isinstance(tier, MemoryTier | StackedTier)
        and WINDOW in tier.arena.stats()["regions"]
        and not isinstance(store.source, MemorySource)
    )


class Ahead(Protocol):
    """Reads ahead of training: :class:`ReadAhead`, or a simulator's."""

    def begin(self, at: Cursor, more: bool, *, hold: bool = False) -> None:
        """Begin the rest of an epoch from ``at`` on; ``more``: continue into the next one."""

    def go_on(self) -> None:
        """Read ahead from now on, if :meth:`begin` was not to."""

    def follow(self, plan: Plan, done: int) -> None:
        """Rewrite the keys of coming accesses, ``done`` of which are over."""


class ReadAhead:
    """Publishes a rank's epochs to the prefetch process, each one epoch before it is needed.

    ``store`` must be such that :func:`can_prefetch`. ``leaves_out`` says which of samples
    ``u32[n]`` are not to be read ahead, ``fetchers`` what :class:`~stoker.epoch.settings.Cache`
    does. A ``forerunner`` may be the prefetch process. Used by the training thread only.
    """

    def __init__(
        self,
        key: str,
        store: Store,
        share: RankShare,
        window: int,
        leaves_out: Callable[[NDArray[np.uint32]], NDArray[np.bool_]],
        fetchers: int | str = "auto",
        forerunner: Forerunner | None = None,
    ) -> None:
        tier = store.tier
        assert isinstance(tier, MemoryTier | StackedTier)
        source = store.source
        self._length = share.most_accesses
        self.progress = Progress(self._length, source, waits=share.reads_blocks)
        """For the workers, who say in it how far they are."""
        self._share = share
        self._leaves_out = leaves_out
        self._published: list[int] = []
        self._held: Cursor | None = None
        self._ahead = max(1, 2 * int(window / max(1.0, float(source.sizes.mean()))))
        self._known = 0  # accesses of the epoch whose keys are rewritten
        self._start = partial(
            Prefetcher,
            # By the memory itself: one of the same data set may be on its way out.
            f"{key}-{os.fstat(tier.arena.handle.fds[0]).st_ino}",
            lambda: Job(source, tier, store.pool, 0 if isinstance(fetchers, str) else fetchers),
            window,
            *store.expect_prefetch(),
            store.stand_ins,
            "" if store.substitution is None else store.substitution.region,
            store.fetch_share,
            tier.entrance if isinstance(tier, MemoryTier) else "",
            forerunner,
        )
        self._forerunner = forerunner
        self._prefetcher: Prefetcher | None = None  # not before there is something to read

    def begin(self, at: Cursor, more: bool, *, hold: bool = False) -> None:
        """Begin the rest of an epoch from ``at`` on; ``more``: continue into the next one.

        ``hold``: read nothing ahead until :meth:`go_on`. The epoch must not have been gone into
        before.
        """
        self._known, self._held = 0, None
        for over in self._published:
            if over < at.epoch:
                self.progress.finish(over, 0, self._length)
        if hold or at.epoch not in self._published or at.consumed:
            if self._prefetcher is not None:
                self._prefetcher.reset()
            self._published = []
            if hold:
                self._held = at
                self.progress.begin(at.epoch, is_held=True)
            else:
                self._publish(at, self.progress.begin(at.epoch))
        if more and at.epoch + 1 not in self._published:
            self._publish(Cursor(at.epoch + 1), self.progress.begin(at.epoch + 1))

    def go_on(self) -> None:
        """Read ahead from now on, if :meth:`begin` was not to."""
        if self._held is not None:
            at, self._held = self._held, None
            self._publish(at, self.progress.memory(at.epoch))

    def follow(self, plan: Plan, done: int) -> None:
        """Rewrite the keys of coming accesses, since those of other jobs have moved on.

        ``done`` accesses of this rank's part of ``plan``, that of :meth:`begin`, are over.
        """
        first = max(done, self._known)
        if first - done >= self._ahead:
            return
        self._known = done + 2 * self._ahead
        keys = self._share.later_keys(plan, first, self._known)
        if keys is not None and self._prefetcher is not None:
            self._prefetcher.write_keys(plan.epoch, first, keys)

    def close(self) -> None:
        """Prefetch no more. May be called again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        elif self._forerunner is not None:
            self._forerunner.close()

    def _publish(self, at: Cursor, marks: SharedArray) -> None:
        coming = self._share.upcoming(at)
        self.progress.leave_out(at.epoch, self._leaves_out(coming.ids))
        if self._prefetcher is None:
            self._prefetcher = self._start()
        self._prefetcher.publish(
            at.epoch, coming.ids, marks, coming.keys, coming.blocks, coming.before
        )
        self._published = [*self._published[-1:], at.epoch]


class DirectReading:
    """Says which batches workers read past the cache, as a copy would only cost them time.

    Looks where samples of the coming epoch lie as it begins, and again while it is requested: once
    they do not lie in memory, the rest of the epoch goes through the cache. Ranks need not agree,
    as each sample is served once in any case. One thread at a time.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_on = False
        """Whether batches are read past the cache now."""
        self.samples = 0
        """Samples requested so."""
        self._source, self._clock = source, clock
        self._looked = 0.0

    def is_likely(self) -> bool:
        """Whether some samples, spread over all, lie in memory now."""
        some = np.linspace(0, len(self._source) - 1, _LOOKED_AT).astype(np.uint32)
        return self._share(some) >= _ENOUGH

    def begin(self, ids: NDArray[np.uint32]) -> bool:
        """Decide for an epoch of samples ``u32[n]``; return :attr:`is_on`."""
        before, self.is_on = self.is_on, self._share(ids) >= _ENOUGH
        if self.is_on and not before:
            log.info("samples lie in the page cache: workers read them past the cache")
        return self.is_on

    def takes(self, ids: NDArray[np.uint32]) -> bool:
        """Whether a batch ``u32[n]`` that is requested now is read past the cache."""
        if self.is_on and self._clock() - self._looked > _INTERVAL:
            self.is_on = self._share(ids) >= _TOO_FEW
            if not self.is_on:
                log.info("samples are not in the page cache any more: the cache is used")
        self.samples += len(ids) if self.is_on else 0
        return self.is_on

    def _share(self, ids: NDArray[np.uint32]) -> float:
        """Return the share of samples in memory, by some that are spread over ``ids``."""
        some = np.linspace(0, len(ids) - 1, min(len(ids), _LOOKED_AT)).astype(np.int64)
        share = self._source.at_hand(ids[some])
        self._looked = self._clock()
        return share

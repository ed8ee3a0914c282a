"""The seam between the store and a place that keeps samples.

What such a tier promises, a tier that keeps nothing, and a guard that turns errors into misses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.shared import SharedArray
from stoker.source.packed import Packed

if TYPE_CHECKING:
    from stoker.store.arena import Arena

Ids = NDArray[np.uint32]
"""Sample ids, ``u32[n]``, contiguous, each below the number of samples."""

Mask = NDArray[np.bool_]
"""One truth value per id, ``bool[n]``."""

NOWHERE = 255
"""The place of samples that must not be kept."""

Keys = NDArray[np.float64] | None
"""What a policy orders samples by, ``f64[n]``, the smallest leaves first; None: its own order."""

Into = NDArray[np.uint8] | None
"""``u8[m]``, writable: memory that samples may be copied to, if it has room."""

_T = TypeVar("_T")


class Tier(Protocol):
    """A place that keeps copies of samples, shared by any number of threads and processes.

    The caller guarantees ids in range. An implementation guarantees: no wrong bytes ever (a
    doubtful copy is a miss), no wait without a limit, batches in the order asked for, and methods
    that any thread may call at any time. An error raised by a method other than :meth:`close` is a
    :class:`~stoker.errors.StokerError` or an :class:`OSError`, and costs only a cache miss.
    """

    def get_many(self, ids: Ids, keys: Keys = None, into: Into = None) -> tuple[Packed, Mask]:
        """Return the cached samples and which were found; one not found has zero length.

        ``keys`` are those that samples have after this access. Samples may lie in ``into``.
        """
        ...

    def put_many(self, ids: Ids, samples: Packed, keys: Keys = None) -> Mask:
        """Offer samples, and return which are cached now. Ends the caller's claims on those."""
        ...

    def discard(self, ids: Ids) -> None:
        """Forget samples, if cached."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return counters; at least ``capacity_bytes``, ``payload_bytes`` and ``entries``."""
        ...

    def close(self) -> None:
        """Release what this process holds. The tier is not used after that."""
        ...


class RegionTier(Tier, Protocol):
    """A tier with regions that a policy arranges, and claims by which one process fetches."""

    @property
    def regions(self) -> tuple[str, ...]:
        """Names that places are indices into."""
        ...

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The arenas that hold samples, the fastest first."""
        ...

    def place_by(self, places: SharedArray) -> None:
        """Put each new sample from now on where ``places`` says, ``u8[N]`` by id.

        A number is an index into the regions of the policy, or :data:`NOWHERE`; its owner may
        change them any time.
        """
        ...

    def set_keys(self, ids: Ids, keys: NDArray[np.float64]) -> None:
        """Give cached samples new keys, ``f64[n]``."""
        ...

    def move(self, ids: Ids, region: str, keys: Keys = None) -> Mask:
        """Move cached samples to another region, if its rules admit them; return which are there.

        None of their bytes are read from below or copied. Without ``keys`` they keep their own.
        """
        ...

    def list(self, region: str) -> Ids:
        """Return the ids that are cached in ``region``, ascending, where a read costs least."""
        ...

    def copies(self, ids: Ids, region: str) -> Ids:
        """Return a number, ``u32[n]``, for each of ``ids`` that :meth:`list` would name, else 0.

        A sample that left the cache and came back has a higher one.
        """
        ...

    def resize(self, shares: Mapping[str, float]) -> None:
        """Divide again, in proportion, the bytes that the regions named have together."""
        ...

    def claim(self, ids: Ids) -> Mask:
        """Claim the right to fetch missing samples, and return which the caller got.

        At most one claimant per id at any time. A claim ends by a successful
        :meth:`put_many`, by :meth:`abandon`, or with the claimant's process.
        """
        ...

    def abandon(self, ids: Ids) -> None:
        """Give back claims; ids that the caller has not claimed are left alone."""
        ...

    def wait(self, ids: Ids, timeout: float) -> Mask:
        """Wait until no other claimant is at work on ``ids``, ``timeout`` seconds at most.

        Returns which are cached now.
        """
        ...


class Found(NamedTuple):
    """What a pool has of a batch."""

    samples: Packed
    """One that was not found has no bytes."""
    found: Mask
    fetched: Mask
    """Which of those found were read from the source for this: they are no hits."""


class Pool(Protocol):
    """Samples that others keep, looked for where the tier misses.

    :class:`stoker.pool.pool_tier.PoolTier` keeps them on other machines,
    :class:`stoker.pool.group_pool.GroupPool` has them from this node's service. It guarantees what
    a :class:`Tier` guarantees, and never makes a caller wait for a write.
    """

    @property
    def reads(self) -> bool:
        """Whether it reads the source for those who ask, so that finding takes that long."""
        ...

    @property
    def wants_plans(self) -> bool:
        """Whether :meth:`begin_plan` and :meth:`pass_by` are of use."""
        ...

    def find(self, ids: Ids, keys: Keys = None) -> Found:
        """Return what it has; ``keys`` as those of :meth:`Tier.get_many`."""
        ...

    def offer(self, ids: Ids, samples: Packed, keys: Keys = None) -> None:
        """Queue samples to be written, unless the queue is full."""
        ...

    def discard(self, ids: Ids) -> None:
        """Queue samples to be forgotten."""
        ...

    def reorder(self, keys: NDArray[np.float64]) -> None:
        """Learn the keys of all samples, ``f64[N]``, in place of those it knew."""
        ...

    def begin_plan(self, ids: Ids, length: int, *, is_last: bool) -> None:
        """Learn the coming accesses of this process's rank, in order, as far as they are known.

        Those of the epoch in progress come first, ``length`` of them; ``is_last``: none after
        those that are known. Not called where the order is the user's.
        """
        ...

    def pass_by(self, accesses: int) -> None:
        """Learn how many of these training has had."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return what is counted, over all processes that have it."""
        ...

    def close(self) -> None:
        """Release it. May be called again."""
        ...


class NullTier:
    """Keeps nothing, so that every access reads the source.

    Takes the place of a tier if the cache is switched off (``cache=0``) or unavailable.
    Holds no state; safe in any thread and process. ``regions``: those of the tier it stands for.
    """

    regions: tuple[str, ...] = ()

    def __init__(self, regions: Sequence[str] = ()) -> None:
        self.regions = tuple(regions)

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """None."""
        return ()

    def get_many(self, ids: Ids, keys: Keys = None, into: Into = None) -> tuple[Packed, Mask]:
        """Find nothing."""
        empty = Packed(np.empty(0, np.uint8), np.zeros(len(ids) + 1, np.int64))
        return empty, np.zeros(len(ids), np.bool_)

    def put_many(self, ids: Ids, samples: Packed, keys: Keys = None) -> Mask:
        """Keep nothing."""
        return np.zeros(len(ids), np.bool_)

    def place_by(self, places: SharedArray) -> None:
        """Do nothing."""

    def set_keys(self, ids: Ids, keys: NDArray[np.float64]) -> None:
        """Do nothing."""

    def move(self, ids: Ids, region: str, keys: Keys = None) -> Mask:
        """Move nothing."""
        return np.zeros(len(ids), np.bool_)

    def list(self, region: str) -> Ids:
        """Return no ids."""
        return np.empty(0, np.uint32)

    def copies(self, ids: Ids, region: str) -> Ids:
        """Find nothing."""
        return np.zeros(len(ids), np.uint32)

    def resize(self, shares: Mapping[str, float]) -> None:
        """Do nothing."""

    def claim(self, ids: Ids) -> Mask:
        """Grant everything: what is not kept is not shared."""
        return np.ones(len(ids), np.bool_)

    def abandon(self, ids: Ids) -> None:
        """Do nothing."""

    def wait(self, ids: Ids, timeout: float) -> Mask:
        """Return at once, with nothing cached."""
        return np.zeros(len(ids), np.bool_)

    def discard(self, ids: Ids) -> None:
        """Do nothing."""

    def stats(self) -> dict[str, Any]:
        """Return zeros."""
        return {"capacity_bytes": 0, "payload_bytes": 0, "entries": 0}

    def close(self) -> None:
        """Do nothing."""


class GuardedTier:
    """Wraps a tier so that its errors cost a read of the source instead of the training run.

    When a method of the wrapped tier raises a :class:`~stoker.errors.StokerError` or an
    :class:`OSError`, :class:`~stoker.store.tier.NullTier` answers in its place: nothing is
    found, nothing is kept, every claim is granted. The first such error of a process warns,
    beginning with ``what``; each is reported to ``on_error``. As safe for threads and processes
    as the wrapped tier.
    """

    def __init__(
        self,
        tier: RegionTier,
        on_error: Callable[[], None],
        what: str = "the cache failed and is bypassed, samples are read from the source",
    ) -> None:
        self.tier = tier
        self._what = what
        self._null = NullTier()
        self._on_error = on_error
        self._closed = False
        self._warned = False

    @property
    def regions(self) -> tuple[str, ...]:
        """Those of the wrapped tier."""
        return self.tier.regions

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Those of the wrapped tier."""
        return self.tier.arenas

    def get_many(self, ids: Ids, keys: Keys = None, into: Into = None) -> tuple[Packed, Mask]:
        """Return what is cached, or nothing when the cache fails."""
        try:
            return self.tier.get_many(ids, keys, into)
        except (StokerError, OSError) as error:
            return self._failed(error, self._null.get_many(ids))

    def put_many(self, ids: Ids, samples: Packed, keys: Keys = None) -> Mask:
        """Offer samples; none is kept when the cache fails."""
        try:
            return self.tier.put_many(ids, samples, keys)
        except (StokerError, OSError) as error:
            return self._failed(error, self._null.put_many(ids, samples))

    def place_by(self, places: SharedArray) -> None:
        """Say where new samples go."""
        try:
            self.tier.place_by(places)
        except (StokerError, OSError) as error:
            self._failed(error, None)

    def set_keys(self, ids: Ids, keys: NDArray[np.float64]) -> None:
        """Give cached samples new keys."""
        try:
            self.tier.set_keys(ids, keys)
        except (StokerError, OSError) as error:
            self._failed(error, None)

    def move(self, ids: Ids, region: str, keys: Keys = None) -> Mask:
        """Move samples to another region; none when the cache fails."""
        try:
            return self.tier.move(ids, region, keys)
        except (StokerError, OSError) as error:
            return self._failed(error, self._null.move(ids, region))

    def list(self, region: str) -> Ids:
        """Return the ids in a region; none when the cache fails."""
        try:
            return self.tier.list(region)
        except (StokerError, OSError) as error:
            return self._failed(error, self._null.list(region))

    def copies(self, ids: Ids, region: str) -> Ids:
        """Return which copies lie in a region; none when the cache fails."""
        try:
            return self.tier.copies(ids, region)
        except (StokerError, OSError) as error:
            return self._failed(error, self._null.copies(ids, region))

    def resize(self, shares: Mapping[str, float]) -> None:
        """Redivide the budgets; they stay as they are when the cache fails."""
        try:
            self.tier.resize(shares)
        except (StokerError, OSError) as error:
            self._failed(error, None)

    def claim(self, ids: Ids) -> Mask:
        """Claim missing samples; all are granted when the cache fails."""
        try:
            return self.tier.claim(ids)
        except (StokerError, OSError) as error:
            return self._failed(error, self._null.claim(ids))

    def abandon(self, ids: Ids) -> None:
        """Give back claims."""
        try:
            self.tier.abandon(ids)
        except (StokerError, OSError) as error:
            self._failed(error, None)

    def wait(self, ids: Ids, timeout: float) -> Mask:
        """Wait for other claimants; not at all when the cache fails."""
        try:
            return self.tier.wait(ids, timeout)
        except (StokerError, OSError) as error:
            return self._failed(error, self._null.wait(ids, timeout))

    def discard(self, ids: Ids) -> None:
        """Forget samples."""
        try:
            self.tier.discard(ids)
        except (StokerError, OSError) as error:
            self._failed(error, None)

    def stats(self) -> dict[str, Any]:
        """Return the tier's counters, or zeros when it fails."""
        try:
            return self.tier.stats()
        except (StokerError, OSError) as error:
            return self._failed(error, self._null.stats())

    def close(self) -> None:
        """Close the wrapped tier; from now on its errors are raised."""
        self._closed = True
        self.tier.close()

    def complain(self, error: Exception) -> None:
        """Report and warn as if a method had raised ``error``."""
        self._failed(error, None)

    def _failed(self, error: Exception, instead: _T) -> _T:
        if self._closed:
            raise error
        self._on_error()
        if not self._warned:
            self._warned = True
            warnings.warn(f"{self._what}: {error}", RuntimeWarning, stacklevel=4)
        return instead

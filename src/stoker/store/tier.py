"""The seam between the store and a place that keeps samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

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


class Tier(Protocol):
    """A place that keeps copies of samples, shared by any number of threads and processes.

    The caller guarantees ids in range. An implementation guarantees: no wrong bytes ever (a
    doubtful copy is a miss), no wait without a limit, batches in the order asked for, and methods
    that any thread may call at any time. An error raised by a method other than :meth:`close` is a
    :class:`~stoker.errors.StokerError` or an :class:`OSError`, and costs only a cache miss.
    """

    def get_many(self, ids: Ids, keys: Keys = None) -> tuple[Packed, Mask]:
        """Return the cached samples and which were found; one not found has zero length.

        ``keys`` are those that samples have after this access.
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


class Pool(Protocol):
    """Samples on other machines, looked for where the tier misses.

    :class:`stoker.pool.pool_tier.PoolTier` is one. It guarantees what a :class:`Tier` guarantees,
    and never makes a caller wait for a write.
    """

    def get_many(self, ids: Ids, keys: Keys = None) -> tuple[Packed, Mask]:
        """Return the samples found, and which were; see :meth:`Tier.get_many`."""
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

    def stats(self) -> dict[str, Any]:
        """Return what is counted, over all processes that have it."""
        ...

    def close(self) -> None:
        """Release it. May be called again."""
        ...

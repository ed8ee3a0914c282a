"""The tier that never fails: errors of the cache become misses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.shared import SharedArray
from stoker.source.packed import Packed
from stoker.store.tier import Ids, Keys, Mask, RegionTier

if TYPE_CHECKING:
    from stoker.store.arena import Arena

_T = TypeVar("_T")


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

    def get_many(self, ids: Ids, keys: Keys = None) -> tuple[Packed, Mask]:
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
    :class:`OSError`, :class:`~stoker.store.guarded.NullTier` answers in its place: nothing is
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

    def get_many(self, ids: Ids, keys: Keys = None) -> tuple[Packed, Mask]:
        """Return what is cached, or nothing when the cache fails."""
        try:
            return self.tier.get_many(ids, keys)
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

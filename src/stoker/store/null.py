"""The tier that keeps nothing: training without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.shared import SharedArray
from stoker.source.packed import Packed
from stoker.store.tier import Ids, Keys, Mask

if TYPE_CHECKING:
    from stoker.store.arena import Arena


class NullTier:
    """Keeps nothing, so that every access reads the source.

    The twin of every other tier where a cache is switched off (``cache=0``) or cannot be had.
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
        """Grant everything: nobody shares what is not kept."""
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

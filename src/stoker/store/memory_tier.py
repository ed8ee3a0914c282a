"""The tier in memory: an arena, and the regions where samples go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker._core import Rooms
from stoker.policy.base import Region
from stoker.shared import SharedArray, in_parts
from stoker.source.packed import Buffer, Packed, pick
from stoker.store.arena import Arena, Samples, turns_of
from stoker.store.tier import NOWHERE, Ids, Into, Keys, Mask

if TYPE_CHECKING:
    from stoker.store.arena import Arena


class MemoryTier:
    """Keeps samples in an :class:`~stoker.store.arena.Arena` under the keys of a policy.

    New samples go to the region ``entrance``, or by :meth:`place_by` to one of ``regions``, by
    default all of the arena's; rejected samples go to ``overflow``, if one is named. The arena
    may be another job's and lack some of these: their samples go to the entrance, and nothing is
    moved to them or found in them. The tier owns the arena and closes it, by ``release`` if given
    (:meth:`SharedArena.close`, for one that was opened shared). Safe in any thread; pickled to
    another process it attaches to the same memory.
    """

    def __init__(
        self,
        arena: Arena,
        entrance: str = "main",
        *,
        regions: Sequence[str] = (),
        overflow: str = "",
        release: Callable[[], None] | None = None,
    ) -> None:
        self.arena = arena
        self.entrance = entrance
        self._order = tuple(arena.stats()["regions"])
        self.regions = tuple(regions) or self._order
        """Names that places are indices into."""
        self.overflow = overflow if overflow in self._order else ""
        self._release = release
        self._places: SharedArray | None = None

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The arenas that hold samples."""
        return (self.arena,)

    def attached(self) -> MemoryTier:
        """Return another membership of the same memory, with leases and claims of its own."""
        arena = type(self.arena).attach(self.arena.handle)
        tier = MemoryTier(arena, self.entrance, regions=self.regions, overflow=self.overflow)
        tier._places = self._places
        return tier

    def entering(self, entrance: str) -> MemoryTier:
        """Return this tier, but that new samples go to ``entrance``; it has the same arena."""
        tier = copy(self)
        tier.entrance = entrance
        return tier

    def rise(self, ids: Ids, keys: Keys = None, overflow: str = "") -> Mask:
        """Return which samples came up from the tier below: none, as there is no such tier."""
        return np.zeros(len(ids), np.bool_)

    def get_many(self, ids: Ids, keys: Keys = None, into: Into = None) -> tuple[Packed, Mask]:
        """Return the cached samples and which were found, and give those their new keys."""
        data, offsets, found = self.arena.get_many(ids, into)
        if keys is not None and found.any():
            self.arena.set_keys(ids[found], keys[found])
        return Packed(data, offsets), found

    def put_many(
        self, ids: Ids, samples: Packed | list[Buffer], keys: Keys = None, overflow: str = ""
    ) -> Mask:
        """Offer samples, packed or each in its buffer, and return which are cached now.

        ``overflow``: the region for rejected samples, in place of the tier's.
        """
        spare = overflow or self.overflow
        if self._places is None:
            return self.arena.put_many(ids, _as_put(samples), keys, self.entrance, spare)
        kept = np.zeros(len(ids), np.bool_)
        for region, chosen in self.targets(ids):
            some = None if keys is None else keys[chosen]
            part = _as_put(samples, chosen)
            kept[chosen] = self.arena.put_many(ids[chosen], part, some, region, spare)
        if overflow and (nowhere := np.flatnonzero(self._places.array[ids] == NOWHERE)).size:
            part = _as_put(samples, nowhere)
            kept[nowhere] = self.arena.put_many(ids[nowhere], part, None, overflow)
        return kept

    def reserve(
        self, ids: Ids, sizes: NDArray[np.int64], keys: Keys = None, overflow: str = ""
    ) -> Rooms | None:
        """Return room for samples on their way, where :meth:`put_many` would put them.

        None where that is not one region for all.
        """
        (region, chosen), *others = self.targets(ids)
        if others or len(chosen) < len(ids):
            return None
        return self.arena.reserve(ids, sizes, keys, region, overflow or self.overflow)

    def drop_from(self, region: str, ids: Ids) -> None:
        """Drop those of ``ids`` that are in ``region`` and that no process leases.

        They pass through the tier's overflow, if there is one, like rejected samples.
        """
        if self.overflow:
            kept = ids if self._places is None else ids[self._places.array[ids] != NOWHERE]
            self.move(kept[self.copies(kept, region) > 0], self.overflow)
        self.arena.discard_from(region, ids)

    def place_by(self, places: SharedArray) -> None:
        """Put each new sample from now on where ``places`` says, ``u8[N]`` by id; NOWHERE: not."""
        self._places = places

    def targets(self, ids: Ids) -> list[tuple[str, NDArray[np.int64]]]:
        """Return the regions where new samples ``ids`` go, each with the ``i64[m]`` that do.

        Those whose place is nowhere are in none; there is one region at least.
        """
        if self._places is None or not len(ids):
            return [(self.entrance, np.arange(len(ids)))]
        wanted = self._places.array[ids]
        somewhere = np.flatnonzero(wanted != NOWHERE)
        places = np.minimum(wanted[somewhere], len(self.regions))
        names = [r if r in self._order else self.entrance for r in (*self.regions, "")]
        found = [(names[p], somewhere[places == p]) for p in np.unique(places).tolist()]
        return found or [(self.entrance, somewhere)]

    def set_keys(self, ids: Ids, keys: NDArray[np.float64]) -> None:
        """Give cached samples new keys."""
        self.arena.set_keys(ids, keys)

    def move(self, ids: Ids, region: str, keys: Keys = None) -> Mask:
        """Move cached samples to another region, and return which are there."""
        if region not in self._order:
            return np.zeros(len(ids), np.bool_)
        return self.arena.move(ids, region, keys)

    def list(self, region: str) -> Ids:
        """Return the ids that are cached in ``region``, ascending."""
        return self.arena.list(region) if region in self._order else np.empty(0, np.uint32)

    def copies(self, ids: Ids, region: str) -> Ids:
        """Return which copy of each of ``ids`` lies in ``region``, ``u32[n]``, 0 for none."""
        if region not in self._order:
            return np.zeros(len(ids), np.uint32)
        return self.arena.copies(ids, region)

    def resize(self, shares: Mapping[str, float]) -> None:
        """Redivide the bytes that the named regions have together."""
        if shares.keys() <= set(self._order):
            self.arena.divide(shares)

    def claim(self, ids: Ids) -> Mask:
        """Claim missing samples, and return which the caller got."""
        return self.arena.claim(ids)

    def abandon(self, ids: Ids) -> None:
        """Give back claims."""
        self.arena.abandon(ids)

    def wait(self, ids: Ids, timeout: float) -> Mask:
        """Wait for other claimants, ``timeout`` seconds at most; return which are cached."""
        return self.arena.wait(ids, timeout)

    def discard(self, ids: Ids) -> None:
        """Forget samples."""
        self.arena.discard(ids)

    def stats(self) -> dict[str, Any]:
        """Return the arena's counters."""
        return dict(self.arena.stats())

    def close(self) -> None:
        """Release the arena."""
        (self._release or self.arena.close)()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        # Only the handle travels: it passes the arena's descriptors to the child.
        state["_release"] = None
        state["arena"] = type(self.arena), self.arena.handle
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        arena_type, handle = state["arena"]
        self.arena = arena_type.attach(handle)


def _as_put(samples: Packed | list[Buffer], chosen: NDArray[np.int64] | None = None) -> Samples:
    """Return samples, all or the chosen ones, as the arena takes them."""
    if isinstance(samples, Packed):
        return tuple(samples if chosen is None else pick(samples, chosen))
    return samples if chosen is None else [samples[i] for i in chosen.tolist()]


def rearrange(
    arena: Arena,
    regions: Sequence[Region],
    places: NDArray[np.uint8],
    keys_of: Callable[[Ids], NDArray[np.float64]],
) -> None:
    """Move each cached sample to the region of its place, if that admits it.

    ``places`` (``u8[N]``) are indices into ``regions``, ``keys_of`` returns the policy's keys
    ``f64[n]`` of samples ``u32[n]``: of several samples for one region the largest key comes
    first. A rejected sample stays, to be evicted later; but where nothing is evicted
    (``while_room``) it is dropped, since it would occupy its space for ever.
    """
    # Those first that need to be emptied before others can enter them.
    for number in sorted(range(len(regions)), key=lambda n: regions[n].admission != "while_room"):
        region = regions[number]
        if not region.holds_bytes:
            continue
        held = arena.list(region.name)
        strays = held[places.take(held) != number]
        keys = keys_of(strays)
        order = np.lexsort((turns_of(strays), keys))[::-1]
        strays, keys = strays[order], keys[order]
        for place in np.unique(places[strays]).tolist():
            if place >= len(regions) or not regions[place].holds_bytes:
                continue
            is_wanted = places[strays] == place
            wanted = strays[is_wanted]
            moved = arena.move(wanted, regions[place].name, keys[is_wanted])
            if region.admission == "while_room":
                arena.discard_from(region.name, wanted[~moved])


def held_in(arena: Arena) -> Ids:
    """Return the samples that are cached, ``u32[n]``, ascending."""
    held = [np.empty(0, np.uint32)]
    for part in in_parts(arena.num_ids):
        ids = np.arange(part.start, part.stop, dtype=np.uint32)
        held.append(ids.take(np.flatnonzero(arena.contains(ids))))
    return np.concatenate(held)


def drop_strays(arena: Arena, regions: Sequence[Region], places: NDArray[np.uint8]) -> None:
    """Let go of cached samples whose place (``u8[N]``) is nowhere, and that no process leases."""
    if not (places == NOWHERE).any():
        return
    there = arena.stats()["regions"]  # it may be another job's
    for region in regions:
        if region.holds_bytes and region.name in there:
            held = arena.list(region.name)
            arena.discard_from(region.name, held[places[held] == NOWHERE])

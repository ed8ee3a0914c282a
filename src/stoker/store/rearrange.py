"""Moves cached samples to where they belong now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.policy.base import Region
from stoker.store.arena import Arena, turns_of
from stoker.store.tier import NOWHERE


def rearrange(
    arena: Arena,
    regions: Sequence[Region],
    places: NDArray[np.uint8],
    keys: NDArray[np.float64],
) -> None:
    """Move each cached sample to the region of its place, if that admits it.

    ``places`` (``u8[N]``) are indices into ``regions``, ``keys`` (``f64[N]``) those of the policy:
    of several samples for one region the largest key comes first. One that is refused stays, to
    be evicted in due time; only where nothing is evicted (``while_room``) it leaves, or it would
    take the room for good.
    """
    # Those first that need to be emptied before others can enter them.
    for number in sorted(range(len(regions)), key=lambda n: regions[n].admission != "while_room"):
        region = regions[number]
        if not region.holds_bytes:
            continue
        held = arena.list(region.name)
        strays = held[places[held] != number]
        strays = strays[np.lexsort((turns_of(strays), keys[strays]))[::-1]]
        for place in np.unique(places[strays]).tolist():
            if place >= len(regions) or not regions[place].holds_bytes:
                continue
            wanted = strays[places[strays] == place]
            moved = arena.move(wanted, regions[place].name, keys[wanted])
            if region.admission == "while_room":
                arena.discard_from(region.name, wanted[~moved])


def drop_strays(arena: Arena, regions: Sequence[Region], places: NDArray[np.uint8]) -> None:
    """Let go of cached samples whose place (``u8[N]``) is nowhere, and that nobody leases."""
    there = arena.stats()["regions"]  # it may be another job's
    for region in regions:
        if region.holds_bytes and region.name in there:
            held = arena.list(region.name)
            arena.discard_from(region.name, held[places[held] == NOWHERE])

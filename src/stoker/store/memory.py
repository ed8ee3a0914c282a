"""The tier in memory: an arena, and the region where new samples go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.store.packed import Packed
from stoker.store.tier import Ids, Keys, Mask

if TYPE_CHECKING:
    from stoker.store.arena import Arena


class MemoryTier:
    """Keeps samples in an :class:`~stoker.store.arena.Arena` under the keys of a policy.

    New samples go to the region ``entrance``. The tier owns the arena and closes it, by
    ``release`` if given (:meth:`SharedArena.close`, for one that was opened shared). Safe in any
    thread; pickled to another process it attaches to the same memory.
    """

    def __init__(
        self,
        arena: Arena,
        entrance: str = "main",
        *,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.arena = arena
        self.entrance = entrance
        self._release = release

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The arenas that hold samples."""
        return (self.arena,)

    def attached(self) -> MemoryTier:
        """Return another membership of the same memory, with leases and claims of its own."""
        return MemoryTier(type(self.arena).attach(self.arena.handle), self.entrance)

    def rise(self, ids: Ids, keys: Keys = None, overflow: str = "") -> Mask:
        """Bring samples up from below, and return which needed no read: none, nothing is below."""
        return np.zeros(len(ids), np.bool_)

    def get_many(self, ids: Ids, keys: Keys = None) -> tuple[Packed, Mask]:
        """Return the cached samples and which were found, and give those their new keys."""
        data, offsets, found = self.arena.get_many(ids)
        if keys is not None and found.any():
            self.arena.set_keys(ids[found], keys[found])
        return Packed(data, offsets), found

    def put_many(self, ids: Ids, samples: Packed, keys: Keys = None, overflow: str = "") -> Mask:
        """Offer samples, and return which are cached now.

        ``overflow``: the region for what the entrance refuses.
        """
        where = (self.entrance, overflow) if overflow else (self.entrance,)
        return self.arena.put_many(ids, tuple(samples), keys, *where)

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
        """Let go of the arena."""
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

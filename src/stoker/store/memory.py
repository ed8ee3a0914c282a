"""The tier in memory: an arena, and a policy that says who stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stoker.store.packed import Packed
from stoker.store.tier import Ids, Mask

if TYPE_CHECKING:
    from stoker.plan import Plan
    from stoker.policy.base import Policy
    from stoker.scores import Scores
    from stoker.store.arena import Arena


class MemoryTier:
    """Keeps samples in an :class:`~stoker.store.arena.Arena` under the keys of a policy.

    ``arena`` must have been given the regions of ``policy``; new samples enter the first one.
    ``scores`` and :attr:`plan` are what the policy may look at. The tier owns the arena and
    closes it, by ``release`` if given (:meth:`SharedArena.close`, for one that was opened
    shared). Safe in any thread; pickled to another process it attaches to the same memory.
    """

    def __init__(
        self,
        arena: Arena,
        policy: Policy,
        scores: Scores | None = None,
        *,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.arena = arena
        self.policy = policy
        self.scores = scores
        self.plan: Plan | None = None
        """The accesses to come, for policies that look ahead; set anew for each epoch."""
        self._release = release
        self._entrance = policy.regions()[0].name

    def get_many(self, ids: Ids, position: int | None = None) -> tuple[Packed, Mask]:
        """Return the cached samples and which were found; re-keys those found if need be."""
        data, offsets, found = self.arena.get_many(ids)
        if not self.policy.natural_keys and found.any():
            cached = ids[found]
            keys = self.policy.keys(cached, self.scores, self.plan, position or 0)
            if keys is not None:
                self.arena.set_keys(cached, keys)
        return Packed(data, offsets), found

    def put_many(self, ids: Ids, samples: Packed, position: int | None = None) -> Mask:
        """Offer samples under the policy's keys, and return which are cached now."""
        keys = None
        if not self.policy.natural_keys:
            keys = self.policy.keys(ids, self.scores, self.plan, position or 0)
        return self.arena.put_many(ids, tuple(samples), keys, self._entrance)

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

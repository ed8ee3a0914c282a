"""What is served in place of samples that are not cached, chosen by all processes together."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker import _core
from stoker.shared import SharedArray
from stoker.store.packed import Packed, gather, pick
from stoker.store.tier import Ids, Mask, Tier

_POOL = 4096  # candidates that a process keeps at hand
_REST = 5  # a search that found little is not repeated for so many times its duration,
_LEAST_REST = 0.002  # or this, in seconds
_PATIENCE = 0.05  # seconds that a process may take between a mark and what it says of it
_LONGEST_CHAIN = 1000


@dataclass(frozen=True)
class Choice:
    """What is to be served for a batch of ``n``."""

    ids: Ids
    """``u32[n]``, the samples to serve; others than asked for where they substitute."""
    taken: NDArray[np.int64]
    """``i64[k]``, the places in the batch that are served from :attr:`samples`, in that order."""
    samples: Packed
    """``k`` substitutes."""
    missing: Mask
    """``bool[n]``: what neither the batch's own look-up nor :attr:`samples` has."""


class Substitutes(Protocol):
    """Chooses what to serve. Safe in any thread; each process has its own over shared arrays."""

    def choose(self, batch: Ids, found: Mask) -> Choice | None:
        """Return what to serve for ``batch``, of which ``found`` are cached; None: just that."""
        ...


class OnceEach:
    """Serves cached samples of a region, each once an epoch: iCache's low-by-low, Quiver's any.

    ``served`` (``u32[N]``) has the stamp of the latest epoch in which a sample was served, set
    by compare-and-swap, so that of all workers and ranks one gets a sample. A sample that asks
    for its turn when it stood in for another already is replaced too; when there is no substitute
    left the one that it displaced gets the turn. So in an epoch without repeats no sample is
    served twice. ``displaced`` (``u64[N]``): the stamp, times 2**32, plus the sample in whose
    turn it was served: its own, or that of the one displaced.

    ``stamp`` and ``seed`` are those of ``epoch`` (``u64[2]``); with stamp 0 nothing is
    substituted. With ``places`` (``u8[N]``) only samples whose place is ``place`` take part.
    Samples that ``fresh`` (``u8[N]``) marks were read ahead for an access of their own. ``clock``
    returns seconds: how long to rest after a search that found little, and what draws its order.
    """

    def __init__(
        self,
        tier: Tier,
        region: str,
        served: SharedArray,
        displaced: SharedArray,
        epoch: SharedArray,
        places: SharedArray | None = None,
        place: int = 0,
        fresh: SharedArray | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier, self._region = tier, region
        self._clock = clock
        self._served, self._displaced = served.array, displaced.array
        self._epoch = epoch.array
        self._places = None if places is None else places.array
        self._place = place
        self._fresh = None if fresh is None else fresh.array
        self._whose = (0, 0)
        # Of threads each takes what it pops; a fork finds it whole.
        self._pool: deque[int] = deque()
        self._search_from = 0.0

    def choose(self, batch: Ids, found: Mask) -> Choice | None:
        """Return what to serve for ``batch``."""
        stamp = int(self._epoch[0])
        if not stamp:
            return None
        open_to = self._takes_part(batch)
        own = np.flatnonzero(found & open_to)
        again = own[~self._mark(batch[own], stamp)]
        wanted = np.concatenate([again, np.flatnonzero(~found & open_to)])
        if not wanted.size:
            return None
        turns, ids, samples = self._take(batch[wanted], stamp)
        taken, rest = wanted[turns], np.delete(wanted, turns)
        chosen, missing = batch.copy(), ~found
        chosen[taken] = ids
        missing[taken] = False
        if rest.size:
            chosen[rest] = self._turns(batch[rest], stamp)
            missing[rest] |= chosen[rest] != batch[rest]
        return Choice(chosen, taken, samples, missing)

    def _mark(self, ids: Ids, stamp: int) -> Mask:
        """Mark ``ids`` as served, and return which were not served before."""
        first = _core.mark_once(self._served, ids, stamp)
        self._note(ids[first], ids[first], stamp)
        return first

    def _note(self, ids: Ids, turns: Ids, stamp: int) -> None:
        self._displaced[ids] = np.uint64(stamp << 32) | turns.astype(np.uint64)

    def _takes_part(self, ids: Ids) -> Mask:
        if self._places is None:
            return np.ones(len(ids), np.bool_)
        inside: Mask = self._places[ids] == self._place
        return inside

    # --- whose turn it is when there are no substitutes ---

    def _turns(self, ids: Ids, stamp: int) -> Ids:
        """Return who is served on the turns of ``ids``, and mark these as served."""
        turns = ids.copy()
        late = np.flatnonzero(~self._mark(ids, stamp))
        deadline = time.monotonic() + _PATIENCE
        while late.size:
            found = [self._displaced_by(int(ids[place]), stamp) for place in late]
            told = np.array([turn is not None for turn in found])
            turns[late[told]] = [turn for turn in found if turn is not None]
            late = late[~told]
            if not late.size or time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        return turns

    def _displaced_by(self, sample: int, stamp: int) -> int | None:
        """Return who is served on the turn of ``sample``, which was served already.

        That is the one at the end of the chain of displaced samples, if it has had no turn, else
        ``sample`` again. None: another process has not said yet whom it displaced.
        """
        last = sample
        for _ in range(_LONGEST_CHAIN):
            entry = int(self._displaced[last])
            if entry >> 32 != stamp:
                return None if entry >> 32 < stamp else sample  # or the epoch is over elsewhere
            last, before = entry & 0xFFFFFFFF, last
            if last == before:
                break
            if self._served[last] < stamp and self._mark(np.array([last], np.uint32), stamp)[0]:
                return last
        return sample

    # --- substitutes ---

    def _take(self, turns: Ids, stamp: int) -> tuple[NDArray[np.int64], Ids, Packed]:
        """Find samples that nobody else serves in this epoch.

        Returns which of ``turns`` (``i64[k]``) they take, the samples (``u32[k]``) and their bytes.
        """
        still = np.arange(len(turns))
        taken = [still[:0]]
        ids = [np.empty(0, np.uint32)]
        parts = [Packed(np.empty(0, np.uint8), np.zeros(1, np.int64))]
        while still.size:
            candidates = self._candidates(len(still), stamp)
            if candidates is None:
                break
            # Copied before they are claimed, so that no claim comes to nothing.
            samples, found = self._tier.get_many(candidates)
            found[found] = _core.mark_once(self._served, candidates[found], stamp)
            won, mine = candidates[found], still[: int(found.sum())]
            self._note(won, turns[mine], stamp)
            taken.append(mine)
            ids.append(won)
            parts.append(pick(samples, np.flatnonzero(found)))
            still = still[len(won) :]
        part = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
        index = np.concatenate([np.arange(len(each)) for each in ids])
        return np.concatenate(taken), np.concatenate(ids), gather(parts, part, index)

    def _candidates(self, wanted: int, stamp: int) -> Ids | None:
        """Return up to ``wanted`` samples that seem to be free; None when there are no more."""
        if self._whose != (stamp, os.getpid()):
            self._whose = stamp, os.getpid()
            self._pool = deque()
            self._search_from = 0.0
        if not self._pool and self._clock() >= self._search_from:
            self._search(stamp)
        pool = self._pool
        if not pool:
            return None
        some: list[int] = []
        with contextlib.suppress(IndexError):  # another thread may empty it
            while len(some) < wanted:
                some.append(pool.popleft())
        ids = np.array(some, np.uint32)
        return ids[(self._served[ids] < stamp) & self._takes_part(ids)]

    def _search(self, stamp: int) -> None:
        begin = self._clock()
        ids = self._tier.list(self._region)
        free = (self._served[ids] < stamp) & self._takes_part(ids)
        if self._fresh is not None:
            free &= self._fresh[ids] == 0
        ids = ids[free]
        # Two processes hardly begin in the same nanosecond, so that their orders differ.
        random = np.random.default_rng((int(self._epoch[1]), stamp, int(begin * 1e9)))
        random.shuffle(ids)
        self._pool.extend(ids[:_POOL].tolist())
        if len(ids) < _POOL:
            now = self._clock()
            self._search_from = now + max(_LEAST_REST, _REST * (now - begin))


class ByNeighbour:
    """Serves the key sample in a region that stands for the one asked for (SpiderCache).

    ``serves`` (``u32[N]``): the key sample of each, N or more for none. A key sample serves as
    often as it is needed.
    """

    def __init__(self, tier: Tier, region: str, serves: SharedArray) -> None:
        self._tier, self._region, self._serves = tier, region, serves.array

    def choose(self, batch: Ids, found: Mask) -> Choice | None:
        """Return what to serve for ``batch``."""
        keys = self._serves[batch]
        wanted = np.flatnonzero(~found & (keys < len(self._serves)))
        if not wanted.size:
            return None
        wanted = wanted[self._tier.within(keys[wanted], self._region)]
        samples, there = self._tier.get_many(keys[wanted])
        taken = wanted[there]
        if not there.all():
            samples = pick(samples, np.flatnonzero(there))
        chosen, missing = batch.copy(), ~found
        chosen[taken] = keys[taken]
        missing[taken] = False
        return Choice(chosen, taken, samples, missing)

"""What is served in place of samples that are not cached, chosen by all processes together."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker._core import mark_once, shuffle
from stoker.shared import SharedArray
from stoker.source.packed import Packed, gather, pick
from stoker.store.claims import Claims, Turns
from stoker.store.registry import Layout
from stoker.store.tier import Ids, Mask, RegionTier

_POOL = 4096  # candidates that a process keeps at hand, or
_POOL_SHARE = 4  # one in so many, if those are more: each search scans all samples
_REST = 5  # a search that found little is not repeated for so many times its duration,
_LEAST_REST = 0.002  # or this, in seconds
_PATIENCE = 0.05  # seconds that a process may take between a mark and what it says of it
_TRIES = 8  # samples that may have left the cache before one becomes a key sample


@dataclass(frozen=True)
class Choice:
    """What is to be served for a batch of ``n``."""

    ids: Ids
    """``u32[n]``, the samples to serve; others than asked for where they substitute."""
    taken: NDArray[np.int64]
    """``i64[k]``, the rows of the batch that are served from :attr:`samples`, in that order."""
    samples: Packed
    """``k`` substitutes."""
    missing: Mask
    """``bool[n]``: what neither the batch's own look-up nor :attr:`samples` has."""


class Substitutes(Protocol):
    """Chooses what to serve. Safe in any thread; each process has its own over shared arrays."""

    def choose(self, batch: Ids, found: Mask, turns: Turns | None = None) -> Choice | None:
        """Return what to serve for ``batch``, of which ``found`` are cached; None: just that.

        ``turns``: which accesses these are; None: some of the epoch in progress.
        """
        ...


class OnceEach:
    """Serves cached samples of a region, each once an epoch: iCache's low-by-low, Quiver's any.

    Each sample that is served is claimed in ``claims``, so that of all workers and ranks one gets
    it. A sample whose turn comes after it was served for another is replaced too; if no substitute
    is left, the sample that it displaced gets the turn. So in an epoch without
    repeats no sample is served twice. Before the first epoch nothing is substituted.

    With ``places`` (``u8[N]``) only samples whose place is ``place`` take part. Samples that
    ``fresh`` (``u8[N]``) marks were read ahead for an access of their own. ``clock`` returns
    seconds: used to space searches that find little, and to draw their order.
    """

    def __init__(
        self,
        tier: RegionTier,
        region: str,
        claims: Claims,
        places: SharedArray | None = None,
        place: int = 0,
        fresh: SharedArray | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier, self._region = tier, region
        self._clock = clock
        self._claims = claims
        self._places = None if places is None else places.array
        self._place = place
        self._fresh = None if fresh is None else fresh.array
        self._whose = (0, 0)
        # Of threads each takes what it pops; a fork finds it whole.
        self._pool: deque[Ids] = deque()
        self._search_from = 0.0
        self._nothing_at = -1  # how many had come when a search of this epoch found nothing

    def choose(self, batch: Ids, found: Mask, turns: Turns | None = None) -> Choice | None:
        """Return what to serve for ``batch``."""
        if not self._claims.holds(turns):
            return None
        stamp = self._claims.stamp if turns is None else turns.stamp
        open_to = self._takes_part(batch)
        own = np.flatnonzero(found & open_to)
        again = own[~self._mark(batch[own], stamp)]
        wanted = np.concatenate([again, np.flatnonzero(~found & open_to)])
        if not wanted.size:
            return None
        taking, ids, samples = self._take(batch[wanted], stamp)
        taken, rest = wanted[taking], np.delete(wanted, taking)
        chosen, missing = batch.copy(), ~found
        chosen[taken] = ids
        missing[taken] = False
        if rest.size:
            chosen[rest] = self._turns(batch[rest], stamp)
            missing[rest] |= chosen[rest] != batch[rest]
        return Choice(chosen, taken, samples, missing)

    def _mark(self, ids: Ids, stamp: int) -> Mask:
        """Mark ``ids`` as served on their own turns, and return which were not served before."""
        first = self._claims.claim(ids, stamp)
        self._claims.note_turns(ids[first], ids[first], stamp)
        return first

    def _takes_part(self, ids: Ids) -> Mask:
        if self._places is None:
            return np.ones(len(ids), np.bool_)
        inside: Mask = self._places.take(ids) == self._place
        return inside

    # --- whose turn it is when there are no substitutes ---

    def _turns(self, ids: Ids, stamp: int) -> Ids:
        """Return who is served on the turns of ``ids``, and mark these as served."""
        turns = ids.copy()
        late = np.flatnonzero(~self._mark(ids, stamp))
        deadline = time.monotonic() + _PATIENCE
        while late.size:
            found, told = self._claims.take_turns(ids[late], stamp)
            turns[late[told]] = found[told]
            late = late[~told]
            if not late.size or time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        return turns

    # --- substitutes ---

    def _take(self, turns: Ids, stamp: int) -> tuple[NDArray[np.int64], Ids, Packed]:
        """Find samples that no other process serves in this epoch.

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
            found[found] = self._claims.claim(candidates[found], stamp)
            won, mine = candidates[found], still[: int(found.sum())]
            self._claims.note_turns(won, turns[mine], stamp)
            taken.append(mine)
            ids.append(won)
            parts.append(pick(samples, np.flatnonzero(found)))
            still = still[len(won) :]
        part = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
        index = np.concatenate([np.arange(len(each)) for each in ids])
        return np.concatenate(taken), np.concatenate(ids), gather(parts, part, index)

    def _candidates(self, wanted: int, stamp: int) -> Ids | None:
        """Return up to ``wanted`` samples that seem to be free; None when there are no more."""
        ids = self.offer(stamp)
        if ids is None:
            return None
        if len(ids) > wanted:
            self.take_back(ids[wanted:])
        ids = ids[:wanted]
        return ids[self._claims.are_free(ids, stamp) & self._takes_part(ids)]

    def offer(self, stamp: int) -> Ids | None:
        """Return samples that were free when they were looked for; None when there are no more."""
        if self._whose != (stamp, os.getpid()):
            self._whose = stamp, os.getpid()
            self._pool = deque()
            self._search_from, self._nothing_at = 0.0, -1
        if not self._pool and self._clock() >= self._search_from:
            self._search(stamp)
        try:
            return self._pool.popleft()
        except IndexError:  # empty, perhaps by another thread
            return None

    def take_back(self, ids: Ids) -> None:
        """Keep what was offered and not used."""
        self._pool.appendleft(ids)

    def _search(self, stamp: int) -> None:
        begin, arrivals = self._clock(), self._arrivals()
        # Samples only cease to be free within an epoch: none is, unless one came since.
        ids = np.empty(0, np.uint32)
        if arrivals != self._nothing_at:
            ids = self._tier.list(self._region)
        ids = ids.compress(self._claims.are_free(ids, stamp))  # a fifth of what ids[...] takes
        ids = ids.compress(self._takes_part(ids))
        if self._fresh is not None:
            ids = ids.compress(self._fresh[ids] == 0)
        # Two processes hardly begin in the same nanosecond, so that their orders differ.
        random = np.random.default_rng((self._claims.rank_seed, stamp, int(begin * 1e9)))
        rest = len(ids) - min(len(ids), max(_POOL, len(ids) // _POOL_SHARE))
        with random.bit_generator.lock:  # as random.shuffle() does, from the last one to `rest`
            shuffle(ids, random.bit_generator.capsule, rest)
        self._nothing_at = -1 if ids.size else arrivals
        if ids.size:
            self._pool.append(ids[rest:])
        if len(ids) < _POOL:
            now = self._clock()
            self._search_from = now + max(_LEAST_REST, _REST * (now - begin))

    def _arrivals(self) -> int:
        """Return how many samples any process has put into the cache so far."""
        counts = self._tier.stats()
        return sum(int(each.get("inserts", 0)) for each in (counts, counts.get("disk", {})))


class _Drawable(NamedTuple):
    """Samples of a region that a process draws from, as of one look at it."""

    stamp: int
    pid: int
    ids: Ids
    random: np.random.Generator


class ByImportant:
    """Serves random samples cached in ``region`` for those of ``place`` (iCache's ST_HC).

    As often as that happens, so that important samples are trained on more often than planned,
    and what they replace less often. Samples of ``place`` that are found are claimed in ``claims``,
    by which packages know what was served. Before the first epoch nothing is substituted. The
    other arguments are those of :class:`OnceEach`.
    """

    def __init__(
        self,
        tier: RegionTier,
        region: str,
        claims: Claims,
        places: SharedArray,
        place: int,
        fresh: SharedArray | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier, self._region = tier, region
        self._claims = claims
        self._places, self._place = places.array, place
        self._fresh = None if fresh is None else fresh.array
        self._clock = clock
        self._drawable = _Drawable(0, 0, np.empty(0, np.uint32), np.random.default_rng(0))
        self._left = 0

    def choose(self, batch: Ids, found: Mask, turns: Turns | None = None) -> Choice | None:
        """Return what to serve for ``batch``."""
        if not self._claims.holds(turns):
            return None
        stamp = self._claims.stamp if turns is None else turns.stamp
        low = self._places[batch] == self._place
        self._claims.claim(batch[found & low], stamp)
        wanted = np.flatnonzero(~found & low)
        if not wanted.size:
            return None
        ids = self._draw(len(wanted), stamp)
        samples, there = self._tier.get_many(ids)
        taken = wanted[: len(ids)][there]
        chosen, missing = batch.copy(), ~found
        chosen[taken] = ids[there]
        missing[taken] = False
        return Choice(chosen, taken, pick(samples, np.flatnonzero(there)), missing)

    def _draw(self, count: int, stamp: int) -> Ids:
        """Return ``count`` random samples of the region, repeats allowed; none if it is empty."""
        now = self._drawable
        if (now.stamp, now.pid) != (stamp, os.getpid()) or self._left <= 0:
            begin = self._clock()
            ids = self._tier.list(self._region)
            if self._fresh is not None:
                ids = ids[self._fresh[ids] == 0]
            random = np.random.default_rng((self._claims.rank_seed, stamp, int(begin * 1e9)))
            now = self._drawable = _Drawable(stamp, os.getpid(), ids, random)
            self._left = max(len(ids), _POOL)  # it is listed again after so many draws
        self._left -= count
        if not len(now.ids):
            return now.ids
        return now.ids[now.random.integers(0, len(now.ids), count)]


class StandIns(NamedTuple):
    """Which key sample stands for which sample, in memory that the ranks of a job on a node share.

    An entry names a copy of a key sample, and counts while that very copy is in the region of key
    samples: so those of a key sample are void once it has left, even if it comes back, and the
    process that writes them may die at any moment.
    """

    serves: SharedArray
    """``u64[N]``: the number of the copy (:meth:`~stoker.store.tier.Tier.copies`) times 2**32, plus
    the key sample that stands for this one; 0: none."""
    keyed: SharedArray
    """``u32[N]``: the copy of this sample that was made a key sample last, 0: none; set by
    compare-and-swap, so that of all ranks one makes it."""

    @staticmethod
    def layout(num_samples: int) -> Layout:
        """Return what :func:`~stoker.store.registry.open_arrays` needs for them."""
        return {"serves": (num_samples, "u8"), "keyed": (num_samples, "u4")}

    @classmethod
    def create(cls, num_samples: int) -> StandIns:
        """Return an empty table."""
        layout = cls.layout(num_samples)
        return cls(*(SharedArray.create(*layout[n], name=f"stoker-{n}") for n in cls._fields))

    @classmethod
    def attach(cls, fds: Sequence[int], num_samples: int) -> StandIns:
        """Return the table in the memory of these descriptors, which stay the caller's."""
        layout = cls.layout(num_samples)
        return cls(
            *(SharedArray.attach(fd, *layout[n]) for fd, n in zip(fds, cls._fields, strict=True))
        )


class ByNeighbour:
    """Serves the key sample in ``region`` that stands for the one asked for (SpiderCache).

    As often as needed; by any number of processes at once.
    """

    def __init__(self, tier: RegionTier, region: str, stand_ins: StandIns) -> None:
        self._tier, self._region = tier, region
        self._serves, self._keyed = stand_ins.serves.array, stand_ins.keyed.array

    def choose(self, batch: Ids, found: Mask, turns: Turns | None = None) -> Choice | None:
        """Return what to serve for ``batch``."""
        wanted = np.flatnonzero(~found)
        if not wanted.size:
            return None
        keys, stands = self.key_samples(batch[wanted])
        if not stands.any():
            return None
        wanted, keys = wanted[stands], keys[stands]
        samples, there = self._tier.get_many(keys)
        taken = wanted[there]
        if not there.all():
            samples = pick(samples, np.flatnonzero(there))
        chosen, missing = batch.copy(), ~found
        chosen[taken] = keys[there]
        missing[taken] = False
        return Choice(chosen, taken, samples, missing)

    def key_samples(self, ids: Ids) -> tuple[Ids, Mask]:
        """Return the key sample of each of ``ids``, ``u32[n]``, and whether one stands for it now.

        Where none does, the first value is meaningless.
        """
        entries = self._serves[ids]
        keys, copies = entries.astype(np.uint32), (entries >> np.uint64(32)).astype(np.uint32)
        stands = (copies > 0) & (keys < len(self._serves))
        keys[~stands] = 0
        stands[stands] = self._tier.copies(keys[stands], self._region) == copies[stands]
        return keys, stands

    def keep(
        self,
        ids: Ids,
        degrees: NDArray[np.int64],
        neighbours_of: Callable[[int], Ids],
    ) -> int | None:
        """Make a key sample of one of ``ids``; see :meth:`Store.keep_key_sample`."""
        # Of several with most neighbours the first.
        waiting = np.where(self._tier.copies(ids, self._region) == 0, degrees, 0)
        for _ in range(min(_TRIES, len(waiting))):
            index = int(waiting.argmax())
            if not waiting[index]:
                break
            waiting[index] = 0
            key = ids[index : index + 1]
            if not self._tier.move(key, self._region).all():
                continue
            copy = int(self._tier.copies(key, self._region)[0])
            # Another rank may have moved it there at the same time: who marks it has made it.
            if copy and mark_once(self._keyed, key, copy)[0]:
                entry = np.uint64(copy << 32 | int(key[0]))
                self._serves[neighbours_of(index)] = entry
                return int(key[0])
        return None

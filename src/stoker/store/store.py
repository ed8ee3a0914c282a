"""The store: serves batches from a tier, and what it misses from the source."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError, SegmentError, StokerError
from stoker.node.bandwidth import FetchShare
from stoker.policy.base import Region, Substitution
from stoker.shared import SharedArray
from stoker.source.base import Source, as_source, check_ids
from stoker.store.claims import Claims, Served, Turns
from stoker.store.counters import Counters
from stoker.store.flight import Completer, Upstream, await_others
from stoker.store.memory_tier import MemoryTier, drop_strays, held_in, rearrange
from stoker.store.registry import open_arrays
from stoker.store.substitutes import ByImportant, ByNeighbour, OnceEach, StandIns, Substitutes
from stoker.store.tier import GuardedTier, Ids, Into, Keys, Mask, NullTier, Pool, RegionTier
from stoker.types import Outcome

FIELDS = (
    "accesses",
    "hits",
    "substituted",
    "fetched",
    "packaged",
    "failed",
    "bypassed",
    "bytes_from_cache",
    "bytes_from_source",
    "read",
    "source_seconds",
    "wait_seconds",
)
"""What is counted, per process, and summed by :meth:`Store.stats`."""


class Store:
    """Serves samples by id: from ``tier`` when it has them, else from ``source``.

    A sample that several processes miss at once is read by one of them; the others wait for
    it, ``wait_seconds`` at most, and then read it themselves. A failing tier is bypassed: that
    costs speed, never the run. Safe in any thread; forked children and processes that receive
    the store by pickling share tier and counters. Also a context manager.

    - ``places`` (``u8[N]``): the region, by its index in the policy, where each sample belongs; new
      ones go there.
    - ``follows_scores``: keys are scores, so a hit changes none.
    - ``packaged`` (``u8[N]``): 1 at samples that came with a package.
    - ``pool``: servers on other machines, where samples are looked for that ``tier`` misses. What
      is found there is a hit, and offered to ``tier``; what is read is offered to the pool.
    - ``substitution``: what is served instead of reading a sample that is not cached. If it
      fails, the requested sample is read. Kinds ``low_by_low`` and ``any`` serve each sample once
      an epoch, from :meth:`begin_epoch` on; ``low_by_low`` and ``low_by_high`` need ``places``.
    - ``claims``: where these kinds claim samples. The ranks of a job on one node share its arrays
      (:func:`~stoker.store.registry.open_arrays`), else the store has its own.
    - ``stand_ins``: where kind ``neighbour`` has which key samples stand for which samples; the
      ranks of a job on one node share it, else the store has its own.
    - ``originals``: what is read for the samples of ``source``, where these are made of larger
      ones; bytes read are counted by its sizes.
    - ``fetch_share``: the job's share of the bandwidth that the user's jobs have on this node;
      reads wait for it, where the node's service sets a limit.
    - ``clock``: returns the seconds by which searches for substitutes are spaced; a simulator
      gives its own.

    Raises :class:`~stoker.errors.ConfigError` for a source without samples, and for shared arrays
    of another length or type or that are missing.
    """

    def __init__(
        self,
        source: Source,
        tier: RegionTier,
        *,
        wait_seconds: float = 10.0,
        places: SharedArray | None = None,
        substitution: Substitution | None = None,
        claims: Claims | None = None,
        stand_ins: StandIns | None = None,
        packaged: SharedArray | None = None,
        pool: Pool | None = None,
        follows_scores: bool = False,
        originals: Source | None = None,
        fetch_share: FetchShare | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = as_source(source)
        if len(self.source) == 0:
            raise ConfigError("the source has 0 samples: there is nothing to serve")
        if not wait_seconds >= 0:
            raise ConfigError(f"wait_seconds={wait_seconds!r} is not a time: use 0 or more seconds")
        self.tier = tier
        self.pool = pool
        self.counters = Counters(FIELDS)
        self.places = places
        self.substitution = substitution
        self.stand_ins = stand_ins
        if substitution is not None and substitution.kind == "neighbour" and stand_ins is None:
            self.stand_ins = StandIns.create(len(self.source))
        self.packaged = packaged
        self.fetch_share = fetch_share
        self.read_seconds = 0.0
        """Seconds that the source takes for a sample, as this process last found; 0: unknown."""
        self._wait_seconds = wait_seconds
        self._follows_scores = follows_scores
        self._originals = originals
        self._clock = clock
        self._fresh: SharedArray | None = None
        self._ahead = SharedArray.create(3, np.float64, name="stoker-ahead")
        self.claims = self._own_claims() if claims is None else claims
        """Which samples were served in this epoch; None if samples are not claimed."""
        self._check_arrays()
        self._closed = False
        self._guard()
        if places is not None:
            self._tier.place_by(places)

    def serve(
        self,
        ids: ArrayLike,
        keys: Keys = None,
        turns: Turns | None = None,
        into: Into = None,
    ) -> Served:
        """Return the samples ``ids`` (integers ``[n]``), in that order; repeats are allowed.

        With a substitution others may be served in their place: SUBSTITUTED, and ``ids`` of the
        result says which. FETCHED samples were read, HIT and PACKAGED ones were cached themselves.

        ``keys`` (``f64[n]``) are those of the cache policy after these accesses, where it needs
        any. ``turns`` says which accesses of the epoch they are, so that what they were served is
        logged; None: some of the current epoch. A sample that cannot be read is reported in
        ``errors`` of the result, not raised. The first access to an id that is not cached is
        FETCHED; repeats of it in the same batch, and samples that another process was fetching, are
        HIT. Their bytes may lie in ``into`` (``u8[m]``).

        Raises :class:`~stoker.errors.ConfigError` for ids out of range and
        :class:`~stoker.errors.SegmentError` after :meth:`close`.
        """
        if self._closed:
            raise SegmentError("the store is closed: make a new one to read samples")
        batch = check_ids(ids, len(self.source))
        if self._keeps_nothing and self.pool is None and _are_distinct(batch):
            return self._read(batch)
        waited = self._await_what_comes(batch)
        cached, found = self._tier.get_many(batch, None if self._follows_scores else keys, into)
        # Now: while the rest is waited for, what was served makes room for the next package.
        came = None if self.packaged is None else found & (self.packaged.array[batch] == 1)
        choice = None
        if self._substitutes is not None:
            choice = self._substitutes.choose(batch, found, turns)
        if self.claims is not None and turns is not None:
            self.claims.log(turns, batch if choice is None or self._repeats else choice.ids)
        if choice is None and found.all():
            served = Served(batch, *cached, np.full(len(batch), Outcome.HIT, np.int8))
        else:
            left = max(0.0, self._wait_seconds - waited)
            rest = Completer(self._upstream(self.pool), self._tier, left)
            served, flight = rest.complete(batch, cached, found, keys, choice)
            self.counters.add(
                read=flight.read,
                source_seconds=flight.source_seconds,
                wait_seconds=flight.wait_seconds,
            )
            if flight.read:
                self.read_seconds = flight.source_seconds / flight.read
        self._count(served, None if came is None else came & (served.ids == batch))
        return served

    def reread(self, served: Served, rows: Sequence[int]) -> Served:
        """Return from the source what was ``served`` at ``rows``, in that order.

        For samples whose cached bytes turned out to be unusable: the copies are forgotten, here
        and in the pool, and these accesses count as FETCHED and no longer as what they were.
        """
        at = np.asarray(rows, np.int64)
        ids = served.ids[at]
        self.discard(ids)
        samples, errors, _, seconds = self._upstream().read(ids)
        again = np.full(len(at), Outcome.FETCHED, np.int8)
        self._tally(ids, served.outcomes[at], np.diff(served.offsets)[at], {}, sign=-1)
        self._tally(ids, again, np.diff(samples.offsets), errors)
        self.counters.add(source_seconds=seconds)
        return Served(ids, samples.data, samples.offsets, again, errors)

    def discard(self, ids: ArrayLike) -> None:
        """Forget the cached copies of ``ids``, which turned out to be unusable."""
        useless = check_ids(ids, len(self.source))
        self._tier.discard(useless)
        if self.pool is not None:
            self.pool.discard(useless)

    def begin_epoch(self, epoch: int, rank_seed: int = 0, earlier: ArrayLike = ()) -> None:
        """Begin ``epoch``, in which each sample may be served once more.

        Call it before the first access of the epoch, in all ranks that share claims, with the same
        arguments. ``rank_seed`` makes their choices differ. ``earlier`` (integers ``[n]``): samples
        that were served in it already, before training was interrupted.
        """
        if self.claims is not None:
            ids = check_ids(np.asarray(earlier, np.uint32), len(self.source))
            self.claims.begin(epoch, rank_seed, ids)

    @property
    def stamp(self) -> int:
        """:attr:`Claims.stamp <stoker.store.claims.Claims.stamp>`; 0 without claims."""
        return 0 if self.claims is None else self.claims.stamp

    @property
    def substitutes(self) -> Substitutes | None:
        """What chooses substitutes in this process; None where there are none."""
        return self._substitutes

    def keep_key_sample(
        self,
        ids: Ids,
        degrees: NDArray[np.int64],
        neighbours_of: Callable[[int], Ids],
    ) -> int | None:
        """Let the sample with most neighbours serve for them from now on; return it.

        Of a batch ``ids`` (``u32[n]``) with ``degrees`` (``i64[n]``): the one of highest degree
        that the substitution's region has not yet, and that is cached, moves there (SpiderCache,
        ICPP 2025). Sample ``ids[i]`` serves for ``neighbours_of(i)`` (``u32``) until it leaves.
        None if there is none. The ranks of a job may call it at the same time: no
        two make a key sample of one copy.
        """
        chosen = self._substitutes
        if not isinstance(chosen, ByNeighbour):
            return None
        return chosen.keep(ids, degrees, neighbours_of)

    def rearrange(
        self,
        regions: Sequence[Region],
        keys_of: Callable[[Ids], NDArray[np.float64]] | None,
        shares: Mapping[str, float] | None = None,
        *,
        moves: bool = True,
    ) -> None:
        """Rearrange the cache: give samples their keys, divide its bytes, move samples.

        ``regions`` are the policy's; ``keys_of`` returns the new keys ``f64[n]`` of samples
        ``u32[n]``, None where the cache orders them itself; ``shares`` say how regions divide
        their bytes, None: as before. Unless ``moves`` is false, samples move to the regions of
        their places. Those that belong nowhere leave. Keys come first, so that a region that
        shrinks loses its least samples, and moves last, so that one that grows has room for them.
        One process of those that share the cache is enough.
        """
        arenas = self.tier.arenas
        try:
            if self.places is not None:
                for arena in arenas:
                    drop_strays(arena, regions, self.places.array)
            if keys_of is not None:
                for arena in arenas:
                    held = held_in(arena)
                    arena.set_keys(held, keys_of(held))
            if shares is not None:
                self.tier.resize(shares)
            if moves and keys_of is not None and self.places is not None:
                for arena in arenas:
                    rearrange(arena, regions, self.places.array, keys_of)
        except (StokerError, OSError) as error:
            self._tier.complain(error)

    def expect_prefetch(self) -> tuple[SharedArray, SharedArray]:
        """Return ``u8[N]`` and ``f64[3]`` for who prefetches.

        It sets 1 in the first at what it reads for a coming access, which then counts as FETCHED,
        and counts in the second what a :class:`~stoker.store.flight.Meter` does. Call it before
        the store is passed to other processes.
        """
        if self._fresh is None:
            self._fresh = SharedArray.create(len(self.source), np.uint8, name="stoker-fresh")
            self._guard()  # what was read ahead is no substitute
        return self._fresh, self._ahead

    def totals(self) -> dict[str, float]:
        """Return what all processes counted so far, and what was read ahead.

        The names of :data:`FIELDS`, of which ``read`` are the samples read in ``source_seconds``;
        ``read_ahead`` the samples that the prefetch process read, ``ahead_seconds`` the time in
        which it was reading, and ``read_ahead_seconds`` that of its reads, added up.
        """
        names = "read_ahead", "ahead_seconds", "read_ahead_seconds"
        return {
            **self.counters.totals(),
            **dict(zip(names, self._ahead.array.tolist(), strict=True)),
        }

    def stats(self) -> dict[str, Any]:
        """Return what all processes counted so far, and the tier's own counters.

        ``accesses`` = ``hits`` + ``substituted`` + ``fetched`` + ``packaged``; ``failed`` reads
        are none of these; ``bypassed`` counts failures of the tier; bytes in bytes, time in
        seconds summed over processes. ``tier`` holds :meth:`Tier.stats`, and ``pool`` those of
        the pool.
        """
        totals: dict[str, Any] = {
            name: value if name.endswith("_seconds") else int(value)
            for name, value in self.totals().items()
        }
        pool = {} if self.pool is None else self.pool.stats()
        return {**totals, "tier": {} if self._closed else self._tier.stats(), "pool": pool}

    def close(self) -> None:
        """Close the tier and the pool; :meth:`stats` still works. May be called again."""
        if not self._closed:
            self._closed = True
            try:
                self.tier.close()
            finally:
                if self.pool is not None:
                    self.pool.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_tier"], state["_substitutes"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._guard()

    def _own_claims(self) -> Claims | None:
        """Return claims of this process and its children, if there is a use for them."""
        if self.substitution is None or not self.substitution.has_claims:
            return None
        return Claims(open_arrays("", Claims.layout(len(self.source), 0), share=False))

    def _check_arrays(self) -> None:
        rules = self.substitution
        if rules is not None and rules.has_places and self.places is None:
            raise ConfigError(f"{rules.kind} substitution needs places: give Store(places=...)")
        for name, shared, dtype in (
            ("places", self.places, np.uint8),
            ("claims.served", None if self.claims is None else self.claims.served, np.uint32),
            ("serves", self.stand_ins and self.stand_ins.serves, np.uint64),
            ("keyed", self.stand_ins and self.stand_ins.keyed, np.uint32),
            ("packaged", self.packaged, np.uint8),
        ):
            if shared is None:
                continue
            if shared.array.shape != (len(self.source),) or shared.array.dtype != dtype:
                raise ConfigError(
                    f"{name} of shape {shared.array.shape}, {shared.array.dtype} is invalid: "
                    f"give {np.dtype(dtype)} of shape {(len(self.source),)}"
                )

    def _guard(self) -> None:
        # Nothing to look up, to claim or to log: workers that read past the cache do only that.
        self._keeps_nothing = isinstance(self.tier, NullTier) and self.claims is None
        self._tier = GuardedTier(self.tier, partial(self.counters.add, bypassed=1))
        self._substitutes = self._substitutes_of(self.substitution)

    def _substitutes_of(self, rules: Substitution | None) -> Substitutes | None:
        if rules is None:
            return None
        if rules.kind == "neighbour":
            assert self.stand_ins is not None
            return ByNeighbour(self._tier, rules.region, self.stand_ins)
        assert self.claims is not None
        regions = self.tier.regions
        if rules.region not in regions:
            return None  # the cache is switched off
        place = regions.index(rules.region)
        if rules.by is not None:
            assert self.places is not None
            return ByImportant(
                self._tier, rules.by, self.claims, self.places, place, self._fresh, self._clock
            )
        places = self.places if rules.has_places else None
        return OnceEach(
            self._tier, rules.region, self.claims, places, place, self._fresh, self._clock
        )

    @property
    def _repeats(self) -> bool:
        """Whether what stands in has its own turn too: then turns are logged, not what they got."""
        return self.substitution is not None and not self.substitution.is_once_each

    def _upstream(self, pool: Pool | None = None) -> Upstream:
        return Upstream(self.source, pool, None if self.fetch_share is None else self._await_turn)

    def _await_what_comes(self, batch: Ids) -> float:
        """Wait for a batch that is cached or on its way, all of it, so that it is copied once.

        Return the seconds. What another sample may stand in for is not waited for.
        """
        tier = self.tier
        if self._fresh is None or self.substitution is not None or not isinstance(tier, MemoryTier):
            return 0.0
        try:
            if not tier.arena.are_coming(batch):
                return 0.0
        except StokerError:  # the tier is asked next, and complains
            return 0.0
        seconds = await_others(self._tier, batch, self._wait_seconds)
        self.counters.add(wait_seconds=seconds)
        return seconds

    def _await_turn(self, ids: Ids) -> None:
        """Wait for the job's share of the bandwidth that the user's jobs have here."""
        assert self.fetch_share is not None
        self.fetch_share.wait(int(self.source.sizes[ids].sum()))

    def _read(self, batch: Ids) -> Served:
        """Return distinct samples from the source."""
        samples, errors, _, seconds = self._upstream().read(batch)
        fetched = np.full(len(batch), Outcome.FETCHED, np.int8)
        self.counters.add(read=len(batch), source_seconds=seconds)
        served = Served(batch, *samples, fetched, errors)
        self._count(served)
        return served

    def _count(self, served: Served, came: Mask | None = None) -> None:
        """Set the outcomes of what was prefetched or came with a package, and count.

        ``came``: what had come with one when it was looked up; it may have left since.
        """
        ids, outcomes = served.ids, served.outcomes
        if self._fresh is not None:
            # What was read here is counted already: then the mark is a later access's.
            due = np.flatnonzero((self._fresh.array[ids] == 1) & (outcomes == Outcome.HIT))
            if due.size:
                due = due[np.unique(ids[due], return_index=True)[1]]
                outcomes[due] = Outcome.FETCHED
                self._fresh.array[ids[due]] = 0
        if self.packaged is not None:
            self.packaged.array[ids[outcomes == Outcome.FETCHED]] = 0  # a copy of its own now
            is_packaged = self.packaged.array[ids] == 1
            if came is not None:
                is_packaged |= came
            outcomes[is_packaged & (outcomes == Outcome.HIT)] = Outcome.PACKAGED
        self._tally(ids, outcomes, np.diff(served.offsets), served.errors)

    def _tally(
        self,
        ids: Ids,
        outcomes: NDArray[np.int8],
        lengths: NDArray[np.int64],
        errors: Mapping[int, Any],
        sign: int = 1,
    ) -> None:
        """Count accesses, or with ``sign`` -1 take them back."""
        failed = list(errors)
        came = np.delete(outcomes, failed) if failed else outcomes
        counts = np.bincount(came, minlength=len(Outcome)).tolist()
        fetched = np.flatnonzero(outcomes == Outcome.FETCHED)
        from_source = int(lengths[fetched].sum())
        from_cache = int(lengths.sum()) - from_source
        if self._originals is not None:
            from_source = int(self._originals.sizes[ids[np.setdiff1d(fetched, failed)]].sum())
        self.counters.add(
            accesses=sign * (len(outcomes) - len(errors)),
            hits=sign * int(counts[Outcome.HIT]),
            substituted=sign * int(counts[Outcome.SUBSTITUTED]),
            fetched=sign * int(counts[Outcome.FETCHED]),
            packaged=sign * int(counts[Outcome.PACKAGED]),
            failed=sign * len(errors),
            bytes_from_cache=sign * from_cache,
            bytes_from_source=sign * from_source,
        )


def _are_distinct(ids: Ids) -> bool:
    return len(set(ids.tolist())) == len(ids)

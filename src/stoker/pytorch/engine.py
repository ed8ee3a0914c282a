"""What happens behind the Loader when an epoch begins and ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from stoker.cluster import Alone
from stoker.cluster.group import joined
from stoker.epoch.agreement import (
    AgreedRescore,
    Agreement,
    Ended,
    put_together,
    scores_of,
)
from stoker.epoch.cached import CachedSamples
from stoker.epoch.cursor import Cursor, Walk
from stoker.epoch.nodes import Locality, Nodes
from stoker.epoch.on_error import OnError
from stoker.epoch.placing import Placing, make_packager
from stoker.epoch.planner import BatchSpec, Planner
from stoker.epoch.ranks import LazyRanks, Ranks, is_first_on_node
from stoker.epoch.read_ahead import ReadAhead, can_prefetch, ranks_on_node, window_bytes
from stoker.epoch.records import Records
from stoker.epoch.requests import RequestSampler
from stoker.epoch.setup import CacheSetup
from stoker.epoch.state import Owner, RankState, dataset_name
from stoker.epoch.stats import Stats
from stoker.epoch.trace_file import check_continues
from stoker.epoch.tracing import Tracer, rank_path
from stoker.errors import ConfigError, StokerError
from stoker.jobs.board import JobTable
from stoker.jobs.member import Member, token_of
from stoker.jobs.merged import Merged
from stoker.jobs.sharing import Sharing
from stoker.plan import Plan
from stoker.pytorch.batch_server import BatchServer
from stoker.pytorch.hand_over import private_collate
from stoker.pytorch.inner import InnerLoader
from stoker.pytorch.meta import Envelope, Meta
from stoker.pytorch.observe import Observer
from stoker.pytorch.plan_sampler import sampled_batch_specs
from stoker.pytorch.ranks import find_nodes, from_rank_zero
from stoker.pytorch.rescoring import Rescore, rescoring_specs, score_anew
from stoker.scores import Scores
from stoker.store.registry import SharedArena

log = logging.getLogger("stoker")

_NONE = np.empty(0, np.uint32)
_NO_PLACES = np.empty(0, np.int64)
_PATIENCE = 10.0  # seconds that another rank may be behind when a state is saved


class Engine:
    """Opens the cache, and begins and ends the epochs of one rank.

    ``outer``, where a method takes it, is the user's loader, whose workers, collate function and
    order are used; it is not kept. Used by the training process only, from one thread.
    """

    def __init__(
        self,
        setup: CacheSetup,
        ranks: LazyRanks,
        planner: Planner,
        observer: Observer,
        agreement: Agreement,
        records: Records,
        *,
        own_order: bool,
        seed: int,
        epochs: int | None,
        on_error: OnError,
        prefetch_bytes: int,
        rescore: Rescore | None,
        locality: bool,
        sharing: Sharing,
        trace: Path | None,
    ) -> None:
        self.walk: Walk | None = None
        """Where the training loop is in the epoch in progress."""
        self.generator_began: torch.Tensor | None = None
        """State that the outer loader's generator had when that epoch began."""
        self._setup = setup
        self._ranks = ranks
        self._planner = planner
        self._observer = observer
        self._records = records
        self._own_order = own_order
        self._seed = seed
        self._epochs = epochs
        self._on_error = on_error
        self._prefetch_bytes = prefetch_bytes
        self._rescore = rescore
        self._wants_locality = locality and not own_order and not setup.recipe.preload
        self._sharing = sharing
        self._trace = trace
        if trace is not None:
            check_continues(trace, self._identity())
        self._agreement = agreement
        self.cached: CachedSamples | None = None
        """The data set through the cache, from the first iteration on."""
        self.ahead: ReadAhead | None = None
        """Prefetch, where there is any."""
        self.tracer: Tracer | None = None
        """Who writes down what happens, where that was asked for."""
        self.inner: InnerLoader | None = None
        """The torch loader that runs the workers."""
        self._iterations = self._workers = 0
        self._placing: Placing | None = None
        self._aside: CachedSamples | None = None
        self._followed: Plan | None = None  # where this job is, for those who share its cache
        self._accesses: dict[str, int] = {}  # by region, of the epoch before the one at hand
        self._resumed: int | None = None  # an epoch that had begun when its state was saved

    def open(self, outer: DataLoader[Any]) -> None:
        """Open the cache and start prefetching, the first time."""
        if self.cached is not None:
            return
        ranks = self._ranks.fix()
        if self._trace is not None and self.tracer is None:
            self.tracer = self._observer.tracer = self._make_tracer(self._trace)
        setup = self._setup
        batch_bytes = setup.mean_size * (outer.batch_size or 1)
        nodes = self._find_nodes(ranks, outer.batch_size or 1)
        ranks_here = ranks_on_node(ranks) if nodes is None else nodes.ranks_here
        window = 0
        if not self._own_order and setup.capacity and setup.stage.is_bytes_of_source:
            window = window_bytes(
                self._prefetch_bytes, setup.capacity, batch_bytes, outer.num_workers, ranks_here
            )
        join = partial(self._join, ranks)
        has_homes = self._planner.locality is not None
        places = 0 if self._own_order else self._planner.most_places
        cached = setup.open(
            ranks, from_rank_zero, window, join, has_homes=has_homes, accesses=places
        )
        try:
            self._placing = self._make_placing(cached, ranks, nodes)
        except BaseException:
            cached.close()
            raise
        self.cached = cached
        self._placing.accesses = self._accesses
        if window and can_prefetch(cached.store):
            share = window // ranks_here
            skip = self._placing.may_be_served_by_others
            self.ahead = ReadAhead(setup.key, cached.store, self._planner, share, skip)
        if setup.policy.follows_scores:
            self._observer.on_scored = self._placing.follow
        homes = self._planner.locality
        held = setup.cache_samples(1 if homes is None else homes.nodes.count)
        self._observer.scorer.cache_holds(held)
        if self._rescore is not None:
            self._aside = cached.aside()
        log.info(setup.describe(cached))

    def begin_epoch(self, outer: DataLoader[Any]) -> tuple[Iterator[Envelope], Walk]:
        """Begin the coming epoch; return its batches, and where the training loop is in it."""
        assert self.cached is not None, "open() comes first"
        if self.inner is None or not outer.persistent_workers:
            self.inner = self._make_inner(outer, self.cached)
        self._workers = outer.num_workers
        at = self._planner.begin()
        self._observer.begin_epoch()
        if self.tracer is not None:
            self.tracer.begin(at.epoch, at.consumed, self._run(outer))
        if outer.generator is not None:
            self.generator_began = outer.generator.get_state()
        now = self.stats()
        if self._own_order:
            self.walk, earlier = Walk(at, None, None, self._ranks.now().world_size), _NONE
            specs: Callable[[], Iterator[BatchSpec]] = partial(self._own_batch_specs, outer, at)
            if self._setup.member is not None:
                self._setup.member.begin_epoch(None, 0, 2 * self._sharing.probe)
        else:
            specs = partial(self._planner.batch_specs, self._plan(outer, at), at)
            self.walk, earlier = self._planner.walk(at), self._planner.earlier(at)
        self._records.begin_epoch(at.epoch, earlier, now)
        bare = 0 if self._setup.member is None else self._setup.member.probe.count
        stamp = self.cached.store.stamp
        self.inner.requests.begin(
            self._next_token(), at.epoch, specs, earlier, stamp=stamp, bare=bare
        )
        return iter(self.inner), self.walk

    def receive(self, envelope: Envelope) -> Meta:
        """Note a batch that the training loop gets; return what it gets to know of it."""
        self._records.add_batch(envelope.meta.ids, envelope.failures)
        if self.tracer is not None:
            self.tracer.batch(envelope.meta, self._records.last_stall)
        if envelope.missed is not None and self._placing is not None:
            self._placing.note_missed(envelope.missed)
        if self._setup.member is not None:
            self._tell(self._setup.member, envelope.meta)
        return self._observer.hand_out(envelope.meta)

    def finish_epoch(self) -> None:
        """Close the books of the epoch in progress, if there is one."""
        self.walk = None
        if self._records.is_open:
            _ = self._observer.scores  # waits for losses still being copied
            self._records.finish_epoch(self.stats())
            if self.tracer is not None:
                self.tracer.end()
            records = self._records
            self._agreement.ended = Ended(
                records.epoch, supply=records.supply(), hit_ratio=records.epochs[-1].hit_ratio
            )

    def save(self, outer: DataLoader[Any], owner: Owner) -> RankState:
        """Return the state of this rank; see ``Loader.state_dict``."""
        walk = self.walk
        coming = self._planner.coming
        if walk is not None and outer.num_workers > 1 and not getattr(outer, "in_order", True):
            raise ConfigError(
                "batches that come out of order are no beginning of the epoch, so there is no "
                "state in the middle of it: take it between epochs, or leave out in_order=False"
            )
        generator = self.generator_began
        if walk is None and outer.generator is not None:
            generator = outer.generator.get_state()
        agreement, placing, backward = self._agreement, self._placing, self._observer.backward
        has_begun = walk is not None or self._resumed == coming.epoch
        if placing is not None:
            self._accesses = placing.accesses_before if has_begun else placing.accesses
        return RankState(
            owner=owner,
            cursor=coming if walk is None else walk.cursor,
            served=self._served(coming if walk is None else walk.start, walk),
            has_begun=has_begun,
            scores=self._observer.scores.arrays(),
            observed=self._observer.step,
            losses=(self._observer.loss_sum, self._observer.loss_count),
            agreed=None if agreement.agreed is None else agreement.agreed.arrays(),
            ended=agreement.ended,
            is_uniform=agreement.is_uniform,
            accesses=self._accesses,
            scorer=self._observer.scorer.state_dict() or None,
            backward=None if backward is None else backward.state_dict(),
            stats=self.stats(),
            failures=tuple(self._records.failures.values()),
            generator=None if generator is None else generator.numpy(),
        )

    def _served(self, start: Cursor, walk: Walk | None) -> NDArray[np.uint32] | None:
        """Return what all ranks' accesses of the epoch were really served, as far as it is over.

        ``u32[n]``; None if that is what the plan has there.
        """
        planner = self._planner
        claims = None if self.cached is None else self.cached.store.claims
        if walk is None:
            return planner.served(start) if planner.deviates(start) else None
        if claims is not None:
            # Other nodes say in their own states what they served.
            patience = _PATIENCE if claims.is_shared and planner.nodes is None else 0.0
            since = claims.logged(start.consumed, walk.cursor.consumed, patience)
        elif planner.deviates(start):
            since = planner.plan(start).ids[: walk.cursor.consumed - start.consumed]
        else:
            return None
        return np.concatenate([planner.served(start), since])

    def plan_of(self, state: RankState) -> str:
        """Return the identity that the plan of a state's epoch has here."""
        planner, epoch = self._planner, state.cursor.epoch
        if not planner.uses_scores:
            return planner.identity(epoch)
        scores = scores_of(state.agreed, len(state.scores["values"]))
        return planner.identity_from(scores, epoch, is_uniform=state.is_uniform)

    def restore(self, outer: DataLoader[Any], state: RankState) -> None:
        """Go on from a state that is this loader's; see ``Loader.load_state_dict``."""
        self.finish_epoch()
        ranks = self._ranks.now()
        scores, losses = state.scores, state.losses
        if self._agreement.needed and state.owner.rank != ranks.rank:
            # What that rank observed since ranks agreed is its own to tell.
            losses = 0.0, 0
            scores = state.agreed or scores_of(None, len(scores["values"])).arrays()
        self._observer.restore(state.observed, losses, scores)
        parts: list[Any] = [self._observer.scorer, self._observer.backward]
        for part, saved in zip(parts, (state.scorer, state.backward), strict=True):
            if saved is not None:
                part.load_state_dict(saved)
        self._agreement.restore(state.agreed, state.ended, state.is_uniform)
        if self._planner.uses_scores:
            agreed = scores_of(state.agreed, len(scores["values"]))
            self._planner.settle(agreed, is_uniform=state.is_uniform)
        self._accesses = state.accesses
        if self._placing is not None:
            self._placing.accesses = state.accesses
        self._planner.resume(state.cursor, state.served)
        self._resumed = state.cursor.epoch if state.has_begun else None
        self._records.restore(state.stats, state.failures, self.stats())
        if outer.generator is not None and state.generator is not None:
            outer.generator.set_state(torch.from_numpy(state.generator))

    def stats(self) -> Stats:
        """Return the counts of this rank and its workers."""
        share = -(-len(self._setup.population) // self._ranks.now().world_size)
        counters, rescored = None, {}
        if self.cached is not None:
            counters = self.cached.store.stats()
            rescored = {} if self._aside is None else self._aside.store.counters.totals()
            stored = counters["bytes_from_source"] + int(rescored.get("bytes_from_source", 0))
            counters["bytes_from_source"] = self.cached.stage.bytes_from_source(stored)
        return self._records.stats(
            counters,
            share,
            rescored=int(rescored.get("accesses", 0)),
            non_finite=self._observer.non_finite,
            scoring_seconds=self._observer.seconds,
            data_bytes=self._setup.data_bytes,
            workers=self._workers,
            **({} if self._placing is None else self._placing.stats()),
        )

    def __str__(self) -> str:
        return str(self._setup)

    def close(self) -> None:
        """Let go of workers, prefetch and cache."""
        self.inner = None
        if self.ahead is not None:
            self.ahead.close()
        if self._placing is not None:
            self._placing.close()
        try:
            self._observer.close()
        finally:
            if self.tracer is not None:
                self.tracer.close()
            if self._setup.member is not None:
                self._setup.member.close()
            if self.cached is not None:
                self.cached.close()

    # --- inside ---

    def _find_nodes(self, ranks: Ranks, batch: int) -> Nodes | None:
        """Return the nodes, if that matters; have ranks prefer what is at home here."""
        substitution = self._setup.recipe.substitution
        is_shared_out = substitution is not None and substitution.is_once_each
        has_homes = self._wants_locality and self._setup.capacity > 0
        if not (has_homes or is_shared_out):
            return None
        nodes = find_nodes(ranks)
        if nodes is not None and nodes.count > 1:
            self._planner.nodes = nodes
            if has_homes:
                homes = self._setup.homes(nodes.count)
                self._planner.locality = Locality(nodes, homes, batch)
                log.info("node %d of %d keeps what is at home there", nodes.own, nodes.count)
        return nodes

    def _make_placing(self, cached: CachedSamples, ranks: Ranks, nodes: Nodes | None) -> Placing:
        setup = self._setup
        packager = make_packager(
            setup.recipe,
            cached.store,
            setup.policy,
            region_bytes=setup.least_low,
            is_bytes_of_source=setup.stage.is_bytes_of_source,
            node=0 if nodes is None else nodes.own,
            seed=self._seed,
        )
        return Placing(
            cached.store,
            setup.policy,
            setup.shares,
            rank=ranks.rank,
            is_node_leader=is_first_on_node(ranks) if nodes is None else nodes.is_first,
            member=setup.member,
            packager=packager,
        )

    def _join(self, ranks: Ranks, arena: SharedArena, policy: Merged) -> Member | None:
        """Join the jobs that share the cache; None, and training goes on, if that fails."""
        setup, recipe = self._setup, self._setup.recipe.name
        inode = os.fstat(arena.arena.handle.fds[0]).st_ino
        try:
            table = JobTable(f"{setup.key} {inode}", setup.population.num_samples)
        except (StokerError, OSError) as error:
            log.info("other jobs at this cache are not known: %s", error)
            return None
        return Member(
            table,
            policy,
            self._sharing,
            token=token_of(ranks.world_size, setup.key, recipe, self._seed),
            name=f"{recipe} {os.getpid()}",
        )

    def _tell(self, member: Member, meta: Meta) -> None:
        """Tell other jobs how far this one is, and heed what they tell."""
        assert self._placing is not None
        plan, start = self._followed, 0 if self.walk is None else self.walk.start.consumed
        places = meta.positions - start if plan is not None else _NO_PLACES
        if member.received(places, self._records.last_stall):
            self._placing.write_keys(self._planner.latest)
        if self.ahead is not None and member.probe.is_over:
            self.ahead.go_on()
        if self.ahead is not None and plan is not None and member.was_shared:
            world_size = self._ranks.now().world_size
            self.ahead.follow(plan, (int(places[-1]) + 1) // world_size)

    def _make_inner(self, outer: DataLoader[Any], cached: CachedSamples) -> InnerLoader:
        progress = self.ahead.progress if self.ahead is not None else None
        bare = cached.past_the_cache() if self._sharing.probe else None
        own = private_collate if outer.collate_fn is default_collate else outer.collate_fn
        server = BatchServer(cached, own, self._on_error, self._seed, progress, self._aside, bare)
        return InnerLoader(outer, server, RequestSampler())

    def _make_tracer(self, path: Path) -> Tracer:
        own = rank_path(path, self._ranks.now().rank)
        return Tracer(own, self._identity(), self._setup.stage.source.sizes)

    def _identity(self) -> dict[str, Any]:
        """Return what a trace is of."""
        population = self._setup.population
        return {
            "dataset": dataset_name(self._setup.dataset.source, population.label),
            "num_samples": population.num_samples,
            "visited": len(population),
            "recipe": self._setup.recipe.name,
            "seed": self._seed,
        }

    def _run(self, outer: DataLoader[Any]) -> dict[str, Any]:
        """Return what a trace says of this run, apart from what it is of."""
        rank, world_size = self._ranks.now()
        return {
            "rank": rank,
            "world_size": world_size,
            "batch_size": outer.batch_size or 1,
            "num_workers": outer.num_workers,
            "epochs": self._epochs,
            "cache_bytes": self._setup.capacity,
            "data_bytes": self._setup.data_bytes,
        }

    def _next_token(self) -> int:
        """Return where the names of an epoch's batches begin; also that of one run again."""
        self._iterations += 1
        return (self._iterations - 1) << 32

    def _own_batch_specs(self, outer: DataLoader[Any], at: Cursor) -> Iterator[BatchSpec]:
        """Yield the batches that the user's sampler asks for."""
        indices: Any = outer.sampler if outer.batch_sampler is None else outer.batch_sampler
        return sampled_batch_specs(indices, self._setup.population, self._ranks.now(), at)

    def _plan(self, outer: DataLoader[Any], at: Cursor) -> Plan:
        """Return the plan of all ranks from ``at`` on, once they agree on it and it is prepared."""
        assert self._placing is not None
        planner, scores = self._planner, self._agree(outer, at)
        plan = planner.plan(at)
        whole = planner.whole(at.epoch) if self._placing.needs_whole else plan
        is_probing = False
        if (member := self._setup.member) is not None:
            may_probe = 0 if at.consumed else planner.batches(at)
            member.begin_epoch(plan, at.consumed + len(plan), may_probe)
            self._followed, is_probing = plan, not member.probe.is_over
        are_here = None
        if planner.locality is not None:
            are_here = planner.locality.are_here(planner.super_epoch(at.epoch))
        earlier = _NONE
        if self.cached is not None and self.cached.store.claims is not None:
            earlier = np.concatenate([planner.served(at), planner.elsewhere(plan)])
        self._placing.begin_epoch(scores, plan, whole, self._epochs, earlier, are_here)
        if self.tracer is not None:
            volatile = np.flatnonzero(scores.volatile).astype(np.uint32)
            self.tracer.prepared(plan, scores.ready, volatile)
        if self.ahead is not None:
            is_last = self._epochs is not None and at.epoch + 1 >= self._epochs
            # A probe would find what was read ahead of its epoch.
            more = not (is_last or planner.uses_scores or self._sharing.probe)
            self.ahead.begin(at, more, hold=is_probing)
        return plan

    def _agree(self, outer: DataLoader[Any], at: Cursor) -> Scores:
        """Return the scores that the plan of the epoch is made from, on all ranks."""
        agreement, planner = self._agreement, self._planner
        ranks = joined(*self._ranks.now()) if agreement.needed else Alone()
        if at.epoch == self._resumed:
            scores = agreement.agreed or self._observer.scores
            if planner.deviates(at):
                planner.note_served(at, put_together(planner.served(at), ranks))
        else:
            rescorer = self._rescorer(outer, at.epoch)
            scores = agreement.reach(at.epoch, ranks, rescorer, planner.begin_epoch)
        self._resumed = None
        if planner.uses_scores:
            planner.settle(scores, is_uniform=agreement.is_uniform)
        if agreement.needed:
            agreement.check(planner.identity(at.epoch), at.epoch, ranks)
        return scores

    def _rescorer(self, outer: DataLoader[Any], epoch: int) -> AgreedRescore | None:
        """Return what has samples scored anew by the user's function, if there is one."""
        rescore, inner, keys = self._rescore, self.inner, self._planner.keys
        if rescore is None or inner is None:
            return None

        def run(ids: NDArray[np.uint32]) -> None:
            begin = time.perf_counter()
            ids = self._setup.population.visited(ids)
            ids = self._planner.by_node(ids, epoch)
            specs = partial(rescoring_specs, ids, self._ranks.now(), outer.batch_size, keys)
            inner.requests.begin(self._next_token(), epoch, specs, _NONE, is_aside=True)
            score_anew(inner, rescore, self._observer)
            self._records.rescoring_seconds += time.perf_counter() - begin

        return run

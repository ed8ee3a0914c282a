"""One rank's training, whatever framework trains: its cache, and its epochs on their way."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import BatchSpec, RequestSampler
from stoker.epoch.cached import (
    BatchMemory,
    CachedSamples,
    Counts,
    OnError,
    RequestServer,
)
from stoker.epoch.controller import Begun, Controller, Opened, Rescore
from stoker.epoch.placing import ON_THEIR_WAY, Placing, make_packager
from stoker.epoch.ranks import (
    LazyRanks,
    Locality,
    Network,
    Nodes,
    Ranks,
    is_first_on_node,
    ranks_on_node,
)
from stoker.epoch.read_ahead import DirectReading, ReadAhead, can_prefetch, window_bytes
from stoker.epoch.records import Bar, Records, SourceBooks
from stoker.epoch.settings import EpochSettings, check_known_end, check_rescore
from stoker.epoch.setup import CacheSetup
from stoker.epoch.state import Owner, RankState, dataset_name
from stoker.epoch.trace_file import check_continues
from stoker.epoch.tracing import Tracer, rank_path, trace_path
from stoker.importance.base import as_scorer
from stoker.jobs.member import token_of
from stoker.node.supervisor import Forerunner
from stoker.prefetch.prefetcher import forerunner, most_fetchers
from stoker.recipes.base import uniform
from stoker.sampler.batching import Batching
from stoker.scores import Scores
from stoker.source.held import MemorySource
from stoker.types import parse_bytes

log = logging.getLogger("stoker")

_T = TypeVar("_T")


class Session:
    """Opens the cache of ``setup``, and takes one rank through its epochs.

    A front end (the Loader, the Feed) has :attr:`requests` served by whatever threads or processes
    it runs, and tells the :attr:`controller` what came of them. ``rescore`` is the user's function,
    or None; ``trace`` the file that what happens is written to; ``batching`` says what batches are,
    where they have no fixed size. Used by the training process only, from one thread.

    Raises :class:`~stoker.errors.ConfigError` for what makes no sense together.
    """

    def __init__(
        self,
        setup: CacheSetup,
        settings: EpochSettings,
        ranks: LazyRanks,
        network: Network,
        *,
        rescore: Any = None,
        trace: str | os.PathLike[str] | None = None,
        batching: Batching | None = None,
        progress: bool = False,
    ) -> None:
        recipe, num_samples = setup.recipe, setup.population.num_samples
        epochs = settings.of_recipe(recipe, setup.cache.sharing.probe)
        if batching is not None:
            source, population = setup.dataset.source, setup.population
            epochs = epochs.batched(batching, source, population)
        scorer = as_scorer(recipe.scorer(num_samples))
        check_rescore(rescore, recipe, scorer)
        if epochs.is_planned:
            check_known_end(recipe, epochs.epochs)
        self.setup = setup
        mixture = setup.population.mixture
        books = None
        if mixture is not None:
            books = SourceBooks(mixture, epochs.seed, setup.stage.source.sizes)
        bar = Bar(lambda: ranks.now().rank == 0) if progress else None
        self.records = Records(num_samples, books, bar)
        """What was counted."""
        if epochs.grouping is not None:
            self.records.tokens_of = epochs.grouping.tokens_of
        self.controller = Controller(
            epochs,
            setup.population,
            setup.sampler_for(None) if epochs.shuffle else uniform,
            setup.policy,
            Scores(num_samples),
            scorer,
            ranks=ranks,
            backward=None if recipe.backward is None else recipe.backward(),
            records=self.records,
            join=network.join,
        )
        """Takes this rank through its epochs."""
        self.controller.planner.check_step()
        self.requests = RequestSampler()
        """The batches of the epoch in progress."""
        self.cached: CachedSamples | None = None
        """The samples through the cache, once it is open."""
        self._aside: CachedSamples | None = None  # for batches that are none of training's
        self._epochs, self._trace = epochs, trace_path(trace)
        self._planned_bytes = setup.capacity  # the cache that plans are chosen for
        self._ranks, self._network = ranks, network
        self._rescores = rescore is not None
        self._placing: Placing | None = None
        self._ahead: ReadAhead | None = None
        self._direct: DirectReading | None = None
        self._tracer: Tracer | None = None
        self._counts: Counts | None = None
        self._iterations = 0
        if self._trace is not None:
            check_continues(self._trace, self._identity())

    # --- the cache ---

    def open(self, workers: int) -> CachedSamples:
        """Open the cache for so many workers and start prefetching, the first time.

        Raises :class:`~stoker.errors.CapacityError` when the memory is not there.
        """
        if self.cached is not None:
            return self.cached
        ranks, setup = self._ranks.fix(), self.setup
        if self._trace is not None and self._tracer is None:
            own = rank_path(self._trace, ranks.rank)
            self._tracer = Tracer(own, self._identity(), setup.stage.source.sizes)
        nodes = self._find_nodes(ranks)
        ranks_here = ranks_on_node(ranks) if nodes is None else nodes.ranks_here
        window = self._window(workers, ranks_here)
        self._expect_batches(workers, ranks_here)
        planner = self.controller.planner
        token = token_of(ranks.world_size, setup.key, setup.recipe.name, self._epochs.seed)
        with contextlib.ExitStack() as undo:
            coming_up = self._forerunner(ranks, window)
            if coming_up is not None:
                undo.callback(coming_up.close)
            cached = setup.open(
                ranks,
                self._network.agree,
                window,
                has_homes=planner.locality is not None,
                accesses=planner.most_places if self._epochs.is_planned else 0,
                token=token,
            )
            undo.callback(cached.close)
            self._placing = self._make_placing(cached, ranks, nodes)
            if window and can_prefetch(cached.store):
                self._ahead = ReadAhead(
                    setup.key,
                    cached.store,
                    self.controller.share,
                    window // ranks_here,
                    self._placing.may_be_served_by_others,
                    setup.cache.fetchers,
                    coming_up,
                )
            elif coming_up is not None:
                coming_up.close()
            undo.pop_all()
        self.cached = cached
        count = 1 if planner.locality is None else planner.locality.nodes.count
        self.controller.observer.scorer.cache_holds(setup.cache_samples(count))
        if self._rescores:
            self._aside = cached.aside()
        self._counts = Counts(cached, self._aside, setup.data_bytes)
        if self._may_stand_aside():
            self._direct = self._counts.direct = DirectReading(setup.stage.source)
        self.controller.open(
            Opened(
                self._placing, self._counts, self._ahead, self._direct, setup.member, self._tracer
            )
        )
        log.info(setup.describe(cached))
        return cached

    def server(self, on_error: OnError, memory: BatchMemory | None = None) -> RequestServer:
        """Return what serves :attr:`requests`, for threads or for worker processes."""
        assert self.cached is not None, "open() comes first"
        progress = None if self._ahead is None else self._ahead.progress
        is_passed = self._direct is not None or self.setup.cache.sharing.probe
        bare = self.cached.past_the_cache() if is_passed else None
        return RequestServer(self.cached, on_error, progress, self._aside, bare, memory)

    def close(self) -> None:
        """Let go of prefetch and cache. May be called again."""
        if self._ahead is not None:
            self._ahead.close()
        if self._placing is not None:
            self._placing.close()
        try:
            self.controller.close()
        finally:
            if self._tracer is not None:
                self._tracer.close()
            if self.setup.member is not None:
                self.setup.member.close()
            if self.cached is not None:
                self.cached.close()

    # --- epochs ---

    def begin(
        self,
        workers: int,
        rescore: Rescore | None = None,
        own: Callable[[Begun], Iterator[BatchSpec]] | None = None,
    ) -> Begun:
        """Begin the coming epoch; :attr:`requests` are its batches.

        ``own`` yields the batches of a sampler of the user's. Raises as
        :meth:`Controller.begin` does.
        """
        assert self.cached is not None and self._counts is not None, "open() comes first"
        self._counts.workers = workers
        begun = self.controller.begin(self._run(workers), rescore)
        self.requests.begin(
            self._next_token(),
            begun.walk.start.epoch,
            partial(own or self.controller.batch_specs, begun),
            begun.earlier,
            stamp=self.cached.store.stamp,
            bare=partial(_is_bare, self._direct, begun.bare),
        )
        return begun

    def held_back(self, arriving: Iterator[_T]) -> Iterator[_T]:
        """Return batches on their way to the loop, with which others may have it probed."""
        member = self.setup.member
        return arriving if member is None else member.held_back(arriving)

    def begin_aside(self, ids: NDArray[np.uint32], epoch: int) -> None:
        """Make :attr:`requests` this rank's batches of ``ids`` ``u32[m]``, to be scored again."""
        specs = partial(self.controller.share.rescoring_specs, ids)
        none = np.empty(0, np.uint32)
        self.requests.begin(self._next_token(), epoch, specs, none, is_aside=True)

    # --- states ---

    def save(
        self, generator: NDArray[np.uint8] | None = None, batches: int | None = None
    ) -> RankState:
        """Return the state of this rank; see :meth:`Controller.save`."""
        owner = self._owner(self.controller.identity())
        state = self.controller.save(owner, generator, batches)
        return state._replace(planned_bytes=self._planned_bytes)

    def restore(self, state: RankState) -> None:
        """Continue from ``state``; StateMismatch, and nothing is changed, if it is another's.

        Plans stay those for the cache that it was saved with, whatever the size of this one.
        """
        planner = self.controller.planner
        before = None
        if self._epochs.shuffle:
            before = planner.plan_by(self.setup.sampler_for(state.planned_bytes))
        try:
            planner.check_step()
            owner = self._owner(self.controller.identity_of(state))
            state.refuse_other(owner, self.setup.population.num_samples)
        except BaseException:
            if before is not None:
                planner.plan_by(before)
            raise
        if state.planned_bytes is not None:
            self._planned_bytes = state.planned_bytes
        self.controller.restore(state)

    # --- inside ---

    def _may_stand_aside(self) -> bool:
        """Whether nothing is lost if samples do not come to the cache."""
        setup, cache, recipe = self.setup, self.setup.cache, self.setup.recipe
        is_needed = recipe.substitution or recipe.preload or cache.pool or cache.disk
        is_plain = self._epochs.is_planned and setup.capacity and setup.stage.is_bytes_of_source
        return bool(cache.stands_aside and is_plain and not (is_needed or cache.sharing.probe))

    def _window(self, workers: int, ranks_here: int) -> int:
        """Return the bytes on top of the cache for what is read ahead."""
        setup = self.setup
        if not (self._epochs.is_planned and setup.capacity and setup.stage.can_read_ahead):
            return 0
        batch_bytes = setup.mean_size * (self._epochs.batch_size or 1)
        asked = parse_bytes(setup.cache.prefetch, name="prefetch")
        fetchers = setup.cache.fetchers
        if isinstance(fetchers, str):
            fetchers = most_fetchers(setup.stage.source, setup.cache.pool is not None)
        return window_bytes(asked, setup.capacity, batch_bytes, workers, ranks_here, fetchers)

    def _forerunner(self, ranks: Ranks, window: int) -> Forerunner | None:
        """Return the prefetch process, to come up while the cache is opened, if one is needed.

        One rank of a node has it started.
        """
        source = self.setup.stage.source
        if not window or not is_first_on_node(ranks) or isinstance(source, MemorySource):
            return None
        if self._may_stand_aside() and DirectReading(source).is_likely():
            return None
        return forerunner()

    def _expect_batches(self, workers: int, ranks_here: int) -> None:
        """Tell the policy how many batches are on their way between storage and the step."""
        setup = self.setup
        if setup.capacity:
            batches = ON_THEIR_WAY * (1 + workers) * ranks_here
            num_bytes = batches * setup.mean_size * (self._epochs.batch_size or 1)
            setup.policy.for_batches(num_bytes / setup.capacity)

    def _find_nodes(self, ranks: Ranks) -> Nodes | None:
        """Return the nodes, if that matters; have ranks prefer what is at home here."""
        setup, epochs = self.setup, self._epochs
        substitution = setup.recipe.substitution
        is_shared_out = substitution is not None and substitution.has_claims
        wants_homes = setup.cache.locality and epochs.is_planned and epochs.shuffle
        has_homes = wants_homes and not setup.recipe.preload and setup.capacity > 0
        # A node keeps the blocks that it reads until they are due, and batches stay as they are.
        has_homes = has_homes and not self.controller.planner.reads_blocks
        has_homes = has_homes and epochs.grouping is None
        if not (has_homes or is_shared_out):
            return None
        nodes = self._network.find_nodes(ranks)
        if nodes is not None and nodes.count > 1:
            locality = None
            if has_homes:
                locality = Locality(nodes, setup.homes(nodes.count), epochs.batch_size or 1)
                log.info("node %d of %d keeps what is at home there", nodes.own, nodes.count)
            self.controller.planner.spread_over(nodes, locality)
        return nodes

    def _make_placing(self, cached: CachedSamples, ranks: Ranks, nodes: Nodes | None) -> Placing:
        setup = self.setup
        packager = make_packager(
            setup.recipe,
            cached.store,
            setup.policy,
            region_bytes=setup.least_low,
            is_bytes_of_source=setup.stage.is_bytes_of_source,
            node=0 if nodes is None else nodes.own,
            seed=self._epochs.seed,
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

    def _next_token(self) -> int:
        """Return where the names of an epoch's batches begin; also that of one run again."""
        self._iterations += 1
        return (self._iterations - 1) << 32

    def _owner(self, plan: str) -> Owner:
        """Return what a state of this session belongs to, whose plan is ``plan``."""
        ranks, population = self._ranks.now(), self.setup.population
        return Owner(
            dataset=dataset_name(self.setup.dataset.source, population.label),
            num_samples=len(population),
            seed=self._epochs.seed,
            recipe=self.setup.recipe.name,
            plan=plan,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )

    def _identity(self) -> dict[str, Any]:
        """Return what a trace is of."""
        population = self.setup.population
        return {
            "dataset": dataset_name(self.setup.dataset.source, population.label),
            "num_samples": population.num_samples,
            "visited": len(population),
            "recipe": self.setup.recipe.name,
            "seed": self._epochs.seed,
        }

    def _run(self, workers: int) -> dict[str, Any]:
        """Return what a trace says of this run, apart from what it is of."""
        rank, world_size = self._ranks.now()
        return {
            "rank": rank,
            "world_size": world_size,
            "batch_size": self._epochs.batch_size or 1,
            "apart": world_size if self._epochs.grouping is None else 1,
            "num_workers": workers,
            "epochs": self._epochs.epochs,
            "cache_bytes": self.setup.capacity,
            "data_bytes": self.setup.data_bytes,
        }


def _is_bare(
    direct: DirectReading | None, first: int, number: int, ids: NDArray[np.uint32]
) -> bool:
    """Whether batch ``number`` is read past the cache; the ``first`` ones are in any case."""
    return number < first or (direct is not None and direct.takes(ids))

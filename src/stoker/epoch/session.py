"""One rank's training, whatever framework trains: its cache, and its epochs on their way."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.agreement import Collective
from stoker.epoch.bar import Bar
from stoker.epoch.batch import BatchSpec, Failure, RequestSampler
from stoker.epoch.cached import (
    CachedSamples,
    Counts,
    NewPixels,
    OnError,
    RequestServer,
    plain_memory,
)
from stoker.epoch.controller import Begun, Controller, Opened, Rescore
from stoker.epoch.direct import DirectReading
from stoker.epoch.mixed import SourceBooks, SourceStats
from stoker.epoch.placing import ON_THEIR_WAY, Placing, make_packager
from stoker.epoch.ranks import Agree, LazyRanks, Locality, Nodes, Ranks, is_first_on_node
from stoker.epoch.read_ahead import ReadAhead, can_prefetch, ranks_on_node, window_bytes
from stoker.epoch.report import write_report
from stoker.epoch.settings import EpochSettings, check_accuracy, check_known_end, check_rescore
from stoker.epoch.setup import CacheSetup
from stoker.epoch.state import Owner, RankState, dataset_name
from stoker.epoch.stats import Records, Stats
from stoker.epoch.trace_file import check_continues
from stoker.epoch.tracing import Tracer, rank_path, trace_path
from stoker.errors import ConfigError, SegmentError, StokerError
from stoker.importance.base import as_scorer
from stoker.jobs.board import JobTable
from stoker.jobs.member import Member, token_of
from stoker.jobs.merged import Merged
from stoker.recipes.base import uniform
from stoker.sampler.batched import Grouping
from stoker.sampler.batching import Batching
from stoker.scores import Scores
from stoker.source.base import Source
from stoker.store.registry import SharedArena
from stoker.types import parse_bytes

log = logging.getLogger("stoker")

_T = TypeVar("_T")


class Network(NamedTuple):
    """How the ranks of a framework speak with each other."""

    agree: Agree
    """Asks rank 0."""
    find_nodes: Callable[[Ranks], Nodes | None]
    """Returns the nodes of the job; None if they are not known, or there is one."""
    join: Callable[[int, int], Collective]
    """Returns what exchanges arrays between several ranks, given rank and world size."""


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
            epochs = _batched(epochs, batching, setup)
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
        cached = setup.open(
            ranks,
            self._network.agree,
            window,
            partial(self._join, token),
            has_homes=planner.locality is not None,
            accesses=planner.most_places if self._epochs.is_planned else 0,
            token=token,
        )
        try:
            self._placing = self._make_placing(cached, ranks, nodes)
            if window and can_prefetch(cached.store):
                skip = self._placing.may_be_served_by_others
                share = window // ranks_here
                self._ahead = ReadAhead(
                    setup.key,
                    cached.store,
                    self.controller.share,
                    share,
                    skip,
                    setup.cache.fetchers,
                )
        except BaseException:
            cached.close()
            raise
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

    def server(self, on_error: OnError, new_pixels: NewPixels = plain_memory) -> RequestServer:
        """Return what serves :attr:`requests`, for threads or for worker processes."""
        assert self.cached is not None, "open() comes first"
        progress = None if self._ahead is None else self._ahead.progress
        is_passed = self._direct is not None or self.setup.cache.sharing.probe
        bare = self.cached.past_the_cache() if is_passed else None
        return RequestServer(self.cached, on_error, progress, self._aside, bare, new_pixels)

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
        return window_bytes(asked, setup.capacity, batch_bytes, workers, ranks_here)

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

    def _join(self, token: int, arena: SharedArena, policy: Merged) -> Member | None:
        """Join the jobs that share the cache; None, and training continues, if that fails."""
        setup, recipe = self.setup, self.setup.recipe.name
        inode = os.fstat(arena.arena.handle.fds[0]).st_ino
        try:
            table = JobTable(f"{setup.key} {inode}", setup.population.num_samples)
        except (StokerError, OSError) as error:
            log.info("other jobs at this cache are not known: %s", error)
            return None
        return Member(
            table,
            policy,
            self.setup.cache.sharing,
            token=token,
            name=f"{recipe} {os.getpid()}",
            partition=setup.partition,
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


def _batched(settings: EpochSettings, batching: Batching, setup: CacheSetup) -> EpochSettings:
    """Return ``settings`` with batches by lengths; ConfigError where samples do not fit."""
    source, population = setup.dataset.source, setup.population
    lengths = batching.lengths_of(source.sizes, are_exact=source.sizes_are_exact)
    visited = population.ids(np.arange(len(population))) if population.label else None
    grouping = Grouping(
        batching,
        lengths,
        visited,
        seed=settings.seed,
        shuffle=settings.shuffle,
        drop_last=settings.drop_last,
    )
    return replace(settings, grouping=grouping, batch_size=grouping.typical)


def export_scores(scores: Scores, source: Source, path: str | os.PathLike[str]) -> None:
    """Write the name and the score of every sample to ``path``, an ``.npz`` file.

    ``paths`` (``S[N]``) are what ``source`` calls its samples, ``scores`` (``f64[N]``) the latest
    ones, NaN for samples never seen: what ``stoker run --order`` takes. Raises OSError.
    """
    names = np.array([os.fsencode(source.name(sample)) for sample in range(len(source))])
    values = np.where(scores.seen > 0, scores.values, np.nan)
    with Path(path).open("wb") as file:  # by itself NumPy adds a suffix to other names
        np.savez(file, paths=names, scores=values)


class FrontEnd:
    """What shows the training loop its batches, on a :class:`Session`: the Loader, the Feed."""

    _session: Session
    _closed = False

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, from 0; a sampler of one's own is told too.

        Optional: iterating again advances by itself. A restored epoch resumes; another one leaves
        its rest out, with a warning. ConfigError for a negative epoch.
        """
        self._session.controller.share.set_epoch(epoch)

    def total_steps(self) -> int:
        """Return the batches of this rank in all ``epochs``; ConfigError if they were not given.

        Where the length of an epoch depends on scores, what a schedule is best laid out by.
        """
        return self._session.controller.share.planned_batches(self._known_epochs())

    def end_epoch(self, accuracy: float | None = None) -> None:
        """Mark the end of an epoch, with the validation accuracy for recipes that adapt to it.

        ``accuracy`` is a share, from 0 to 1. Where only some ranks tell it, all take the mean of
        theirs when the next epoch begins. A recipe that adapts to it and is told none warns once.
        Waits for losses that are still being copied. Raises
        :class:`~stoker.errors.ConfigError` for an accuracy out of range.
        """
        self._check_open()
        accuracy = None if accuracy is None else check_accuracy(accuracy)
        self._session.controller.end()
        self._session.controller.tell(accuracy)
        records = self._session.records
        if records.epochs:
            told = "" if accuracy is None else f", accuracy {accuracy:.4f}"
            last = records.epochs[-1]
            log.info("epoch %d%s: %s; %s", records.epoch, told, last.summary, last.verdict)

    def close(self) -> None:
        """Stop what makes batches and let go of the cache, which lives on while another job has it.

        May be called again; also done by ``with``, and by the system when the process dies.
        """
        if self._closed:
            return
        self._stop()
        self._session.controller.end()
        self._closed = True
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stop(self) -> None:
        """Stop the workers or threads, and abandon the batches on their way."""

    def _check_open(self) -> None:
        if self._closed:
            raise SegmentError(f"this {type(self).__name__} is closed: make a new one")

    def _known_epochs(self) -> int:
        """Return how many epochs the whole training has."""
        epochs = self._session.controller.settings.epochs
        if epochs is None:
            name = type(self).__name__
            raise ConfigError(f"total_steps() needs the number of epochs: give the {name} epochs=")
        return epochs

    # --- what is known of samples and counts ---

    @property
    def cache(self) -> CachedSamples | None:
        """The samples through the cache, for a look at what it holds; None before iterating."""
        return self._session.cached

    @property
    def scores(self) -> Scores:
        """Latest score of each sample (``values``), when (``last``) and how often (``seen``)."""
        return self._session.controller.observer.scores

    def export_scores(self, path: str | os.PathLike[str]) -> None:
        """Write names and scores of all samples to an ``.npz`` file, for ``stoker run --order``.

        Of several ranks one is enough, once an epoch has begun: they agree then. Raises OSError.
        """
        export_scores(self.scores, self._session.setup.dataset.source, path)

    @property
    def stats(self) -> Stats:
        """Counts since this was made, and before the state that it resumed was saved.

        Of this rank and its workers.
        """
        return self._session.controller.stats()

    @property
    def source_stats(self) -> dict[str, SourceStats]:
        """Counts of each source of a mixture, by name; likewise, of batches handed out.

        Draws the order of the epoch again, to know how often each source was visited. ConfigError
        for a data set that is no mixture.
        """
        controller, sources = self._session.controller, self._session.records.sources
        if sources is None:
            raise ConfigError("this is no mixture: stats counts its one source, or see stoker.mix")
        at = controller.share.coming if controller.walk is None else controller.walk.cursor
        return sources.stats(at.epoch, controller.planner.served(at))

    @property
    def epoch_stats(self) -> list[Stats]:
        """Stats of each epoch that has ended since this was made, abandoned ones included."""
        return list(self._session.records.epochs)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write what each epoch that has ended did to ``path``, an HTML page that loads nothing.

        Hits beside the most that are possible, the share of waiting, a histogram of the waits for
        batches and the sizes of samples; of this rank. Raises
        :class:`~stoker.errors.ConfigError` if no epoch has ended, and OSError.
        """
        setup, records = self._session.setup, self._session.records
        sizes = setup.population.sizes(setup.stage.source.sizes)
        facts = {"recipe": setup.recipe.name, "samples": len(setup.population)}
        waits = records.waits.counts
        write_report(path, facts, records.epochs, waits, sizes, setup.capacity)

    @property
    def quarantine(self) -> list[Failure]:
        """Samples that could not be served and were replaced, each once, with the last reason."""
        return list(self._session.records.failures.values())


def _is_bare(
    direct: DirectReading | None, first: int, number: int, ids: NDArray[np.uint32]
) -> bool:
    """Whether batch ``number`` is read past the cache; the ``first`` ones are in any case."""
    return number < first or (direct is not None and direct.takes(ids))

"""What an epoch of the Loader needs of torch: workers, tensors, and the cache that they share."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from stoker.epoch.cached import CachedSamples
from stoker.epoch.controller import Controller, Opened
from stoker.epoch.cursor import Cursor, Walk
from stoker.epoch.nodes import Locality, Nodes
from stoker.epoch.on_error import OnError
from stoker.epoch.placing import Placing, make_packager
from stoker.epoch.planner import BatchSpec
from stoker.epoch.ranks import LazyRanks, Ranks, is_first_on_node
from stoker.epoch.read_ahead import ReadAhead, can_prefetch, ranks_on_node, window_bytes
from stoker.epoch.requests import RequestSampler
from stoker.epoch.setup import CacheSetup
from stoker.epoch.state import Owner, RankState, dataset_name
from stoker.epoch.trace_file import check_continues
from stoker.epoch.tracing import Tracer, rank_path
from stoker.errors import ConfigError, StokerError
from stoker.jobs.board import JobTable
from stoker.jobs.member import Member, Sharing, token_of
from stoker.jobs.merged import Merged
from stoker.pytorch.batch_server import BatchServer
from stoker.pytorch.hand_over import private_collate
from stoker.pytorch.inner import InnerLoader
from stoker.pytorch.meta import Envelope, Meta
from stoker.pytorch.observe import TensorObserver
from stoker.pytorch.plan_sampler import sampled_batch_specs
from stoker.pytorch.ranks import find_nodes, from_rank_zero
from stoker.pytorch.rescoring import Rescore, rescoring_specs, score_anew
from stoker.store.registry import SharedArena

log = logging.getLogger("stoker")

_NONE = np.empty(0, np.uint32)


class Engine:
    """Opens the cache, and feeds the workers the epochs that ``controller`` takes them through.

    ``outer``, where a method takes it, is the user's loader, whose workers, collate function and
    order are used; it is not kept. Used by the training process only, from one thread.
    """

    def __init__(
        self,
        setup: CacheSetup,
        ranks: LazyRanks,
        controller: Controller,
        *,
        on_error: OnError,
        prefetch_bytes: int,
        rescore: Rescore | None,
        locality: bool,
        sharing: Sharing,
        trace: Path | None,
    ) -> None:
        self.observer = TensorObserver(controller.observer)
        """Takes what training shows in tensors."""
        self.cached: CachedSamples | None = None
        """The data set through the cache, from the first iteration on."""
        self.inner: InnerLoader | None = None
        """The torch loader that runs the workers."""
        self._setup = setup
        self._ranks = ranks
        self._controller = controller
        self._on_error = on_error
        self._prefetch_bytes = prefetch_bytes
        self._rescore = rescore
        self._is_planned = controller.settings.is_planned
        self._wants_locality = locality and self._is_planned and not setup.recipe.preload
        self._sharing = sharing
        self._trace = trace
        if trace is not None:
            check_continues(trace, self._identity())
        self._generator_began: torch.Tensor | None = None
        self._iterations = self._workers = 0
        self._placing: Placing | None = None
        self._aside: CachedSamples | None = None
        self._tracer: Tracer | None = None

    def open(self, outer: DataLoader[Any]) -> None:
        """Open the cache and start prefetching, the first time."""
        if self.cached is not None:
            return
        ranks, setup = self._ranks.fix(), self._setup
        if self._trace is not None and self._tracer is None:
            own = rank_path(self._trace, ranks.rank)
            self._tracer = Tracer(own, self._identity(), setup.stage.source.sizes)
        nodes = self._find_nodes(ranks, outer.batch_size or 1)
        ranks_here = ranks_on_node(ranks) if nodes is None else nodes.ranks_here
        window = self._window(outer, ranks_here)
        planner = self._controller.planner
        cached = setup.open(
            ranks,
            from_rank_zero,
            window,
            partial(self._join, ranks),
            has_homes=planner.locality is not None,
            accesses=planner.most_places if self._is_planned else 0,
        )
        try:
            self._placing = self._make_placing(cached, ranks, nodes)
        except BaseException:
            cached.close()
            raise
        self.cached = cached
        ahead = None
        if window and can_prefetch(cached.store):
            share = window // ranks_here
            skip = self._placing.may_be_served_by_others
            ahead = ReadAhead(setup.key, cached.store, planner, share, skip)
        count = 1 if planner.locality is None else planner.locality.nodes.count
        self._controller.observer.scorer.cache_holds(setup.cache_samples(count))
        if self._rescore is not None:
            self._aside = cached.aside()
        self._controller.open(
            Opened(
                self._placing, partial(self._counters, cached), ahead, setup.member, self._tracer
            )
        )
        log.info(setup.describe(cached))

    def begin_epoch(self, outer: DataLoader[Any]) -> tuple[Iterator[Envelope], Walk]:
        """Begin the coming epoch; return its batches, and where the training loop is in it."""
        assert self.cached is not None, "open() comes first"
        if self.inner is None or not outer.persistent_workers:
            self.inner = self._make_inner(outer, self.cached)
        self._workers = outer.num_workers
        if outer.generator is not None:
            self._generator_began = outer.generator.get_state()
        begun = self._controller.begin(self._run(outer), self._rescorer(outer, self.inner))
        at = begun.walk.start
        specs: Callable[[], Iterator[BatchSpec]] = partial(self._own_batch_specs, outer, at)
        if self._is_planned:
            specs = partial(self._controller.batch_specs, begun)
        self.inner.requests.begin(
            self._next_token(),
            at.epoch,
            specs,
            begun.earlier,
            stamp=self.cached.store.stamp,
            bare=begun.bare,
        )
        return iter(self.inner), begun.walk

    def receive(self, envelope: Envelope) -> Meta:
        """Note a batch that the training loop gets; return what it gets to know of it."""
        return self._controller.receive(envelope.meta, envelope.failures, envelope.missed)

    def save(self, outer: DataLoader[Any], owner: Owner) -> RankState:
        """Return the state of this rank; see ``Loader.state_dict``."""
        walk = self._controller.walk
        if walk is not None and outer.num_workers > 1 and not getattr(outer, "in_order", True):
            raise ConfigError(
                "batches that come out of order are no beginning of the epoch, so there is no "
                "state in the middle of it: take it between epochs, or leave out in_order=False"
            )
        generator = self._generator_began
        if walk is None and outer.generator is not None:
            generator = outer.generator.get_state()
        return self._controller.save(owner, None if generator is None else generator.numpy())

    def restore(self, outer: DataLoader[Any], state: RankState) -> None:
        """Continue from a state that is this loader's; see ``Loader.load_state_dict``."""
        self._controller.restore(state)
        if outer.generator is not None and state.generator is not None:
            outer.generator.set_state(torch.from_numpy(state.generator))

    def __str__(self) -> str:
        return str(self._setup)

    def close(self) -> None:
        """Let go of workers, prefetch and cache."""
        self.inner = None
        opened = self._controller.opened
        if opened is not None and opened.ahead is not None:
            opened.ahead.close()
        if self._placing is not None:
            self._placing.close()
        try:
            self._controller.close()
        finally:
            if self._tracer is not None:
                self._tracer.close()
            if self._setup.member is not None:
                self._setup.member.close()
            if self.cached is not None:
                self.cached.close()

    # --- inside ---

    def _window(self, outer: DataLoader[Any], ranks_here: int) -> int:
        """Return the bytes on top of the cache for what is read ahead."""
        setup = self._setup
        if not (self._is_planned and setup.capacity and setup.stage.is_bytes_of_source):
            return 0
        batch_bytes = setup.mean_size * (outer.batch_size or 1)
        return window_bytes(
            self._prefetch_bytes, setup.capacity, batch_bytes, outer.num_workers, ranks_here
        )

    def _find_nodes(self, ranks: Ranks, batch: int) -> Nodes | None:
        """Return the nodes, if that matters; have ranks prefer what is at home here."""
        substitution = self._setup.recipe.substitution
        is_shared_out = substitution is not None and substitution.is_once_each
        has_homes = self._wants_locality and self._setup.capacity > 0
        if not (has_homes or is_shared_out):
            return None
        nodes = find_nodes(ranks)
        if nodes is not None and nodes.count > 1:
            locality = None
            if has_homes:
                locality = Locality(nodes, self._setup.homes(nodes.count), batch)
                log.info("node %d of %d keeps what is at home there", nodes.own, nodes.count)
            self._controller.planner.spread_over(nodes, locality)
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
            seed=self._controller.settings.seed,
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
            token=token_of(ranks.world_size, setup.key, recipe, self._controller.settings.seed),
            name=f"{recipe} {os.getpid()}",
        )

    def _make_inner(self, outer: DataLoader[Any], cached: CachedSamples) -> InnerLoader:
        opened, seed = self._controller.opened, self._controller.settings.seed
        ahead = None if opened is None else opened.ahead
        progress = None if ahead is None else ahead.progress
        bare = cached.past_the_cache() if self._sharing.probe else None
        own = private_collate if outer.collate_fn is default_collate else outer.collate_fn
        server = BatchServer(cached, own, self._on_error, seed, progress, self._aside, bare)
        return InnerLoader(outer, server, RequestSampler())

    def _identity(self) -> dict[str, Any]:
        """Return what a trace is of."""
        population = self._setup.population
        return {
            "dataset": dataset_name(self._setup.dataset.source, population.label),
            "num_samples": population.num_samples,
            "visited": len(population),
            "recipe": self._setup.recipe.name,
            "seed": self._controller.settings.seed,
        }

    def _run(self, outer: DataLoader[Any]) -> dict[str, Any]:
        """Return what a trace says of this run, apart from what it is of."""
        rank, world_size = self._ranks.now()
        return {
            "rank": rank,
            "world_size": world_size,
            "batch_size": outer.batch_size or 1,
            "num_workers": outer.num_workers,
            "epochs": self._controller.settings.epochs,
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

    def _rescorer(
        self, outer: DataLoader[Any], inner: InnerLoader
    ) -> Callable[[NDArray[np.uint32], int], None] | None:
        """Return what has samples scored again by the user's function, if there is one."""
        rescore, keys = self._rescore, self._controller.planner.keys
        if rescore is None:
            return None

        def run(ids: NDArray[np.uint32], epoch: int) -> None:
            specs = partial(rescoring_specs, ids, self._ranks.now(), outer.batch_size, keys)
            inner.requests.begin(self._next_token(), epoch, specs, _NONE, is_aside=True)
            score_anew(inner, rescore, self.observer)

        return run

    def _counters(self, cached: CachedSamples) -> dict[str, Any]:
        """Return the counts of this rank and its workers."""
        counters = cached.store.stats()
        apart = {} if self._aside is None else self._aside.store.counters.totals()
        stored = counters["bytes_from_source"] + int(apart.get("bytes_from_source", 0))
        return {
            **counters,
            "bytes_from_source": cached.stage.bytes_from_source(stored),
            "rescored": int(apart.get("accesses", 0)),
            "data_bytes": self._setup.data_bytes,
            "workers": self._workers,
        }

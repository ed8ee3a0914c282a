"""What happens behind the Loader when an epoch begins and ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from stoker.pytorch.batch_server import BatchServer
from stoker.pytorch.cached import CachedDataset
from stoker.pytorch.cursor import Cursor, Walk
from stoker.pytorch.inner import InnerLoader
from stoker.pytorch.meta import Envelope
from stoker.pytorch.observe import Observer
from stoker.pytorch.on_error import OnError
from stoker.pytorch.open_cache import CacheSetup
from stoker.pytorch.planner import Draw, Planner, draws_of
from stoker.pytorch.ranks import LazyRanks, is_first_on_node
from stoker.pytorch.read_ahead import ReadAhead, can_prefetch, ranks_on_node, window_bytes
from stoker.pytorch.records import Records
from stoker.pytorch.requests import RequestSampler
from stoker.pytorch.stats import Stats

log = logging.getLogger("stoker")


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
        records: Records,
        *,
        own_order: bool,
        seed: int,
        epochs: int | None,
        on_error: OnError,
        prefetch_bytes: int,
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
        self.cached: CachedDataset | None = None
        """The data set through the cache, from the first iteration on."""
        self.ahead: ReadAhead | None = None
        """Prefetch, where there is any."""
        self.inner: InnerLoader | None = None
        """The torch loader that runs the workers."""
        self._iterations = 0

    def open(self, outer: DataLoader[Any]) -> None:
        """Open the cache and start prefetching, the first time."""
        if self.cached is not None:
            return
        ranks = self._ranks.fix()
        setup = self._setup
        batch_bytes = setup.mean_size * (outer.batch_size or 1)
        window = 0
        if not self._own_order and setup.capacity and setup.stage.is_bytes_of_source:
            window = window_bytes(
                self._prefetch_bytes, setup.capacity, batch_bytes, outer.num_workers, ranks
            )
        self.cached = setup.open(ranks, window)
        if window and can_prefetch(self.cached.store):
            share = window // ranks_on_node(ranks)
            self.ahead = ReadAhead(setup.key, self.cached.store, self._planner, share)
        log.info(setup.describe(self.cached))

    def begin_epoch(self, outer: DataLoader[Any]) -> tuple[Iterator[Envelope], Walk]:
        """Begin the coming epoch; return its batches, and where the training loop is in it."""
        assert self.cached is not None, "open() comes first"
        if self.inner is None or not outer.persistent_workers:
            self.inner = self._make_inner(outer, self.cached)
        at = self._planner.begin()
        self._observer.begin_epoch()
        if outer.generator is not None:
            self.generator_began = outer.generator.get_state()
        earlier = np.empty(0, np.uint32) if self._own_order else self._planner.earlier(at)
        self._records.begin_epoch(at.epoch, earlier, self.stats())
        # Tokens are never reused, also when an epoch is run again.
        token, draws = self._iterations << 32, self._draws(outer, at, self.cached)
        self.inner.requests.begin(token, at.epoch, draws, earlier)
        self._iterations += 1
        if self._own_order:
            self.walk = Walk(at, None, None, self._ranks.now().world_size)
        else:
            self.walk = self._planner.walk(at)
        return iter(self.inner), self.walk

    def finish_epoch(self) -> None:
        """Close the books of the epoch in progress, if there is one."""
        self.walk = None
        if self._records.is_open:
            _ = self._observer.scores  # waits for losses still being copied
            self._records.finish_epoch(self.stats())

    def stats(self) -> Stats:
        """Return the counts of this rank and its workers."""
        share = -(-len(self._setup.population) // self._ranks.now().world_size)
        return self._records.stats(self.cached, self._observer.non_finite, share)

    def close(self) -> None:
        """Let go of workers, prefetch and cache."""
        self.inner = None
        if self.ahead is not None:
            self.ahead.close()
        if self.cached is not None:
            self.cached.close()

    # --- inside ---

    def _make_inner(self, outer: DataLoader[Any], cached: CachedDataset) -> InnerLoader:
        progress = self.ahead.progress if self.ahead is not None else None
        server = BatchServer(cached, outer.collate_fn, self._on_error, self._seed, progress)
        return InnerLoader(outer, server, RequestSampler())

    def _draws(
        self, outer: DataLoader[Any], at: Cursor, cached: CachedDataset
    ) -> Callable[[], Iterator[Draw]]:
        """Return what draws this rank's batches from ``at`` on."""
        ranks = self._ranks.now()
        if self._own_order:
            indices: Any = outer.sampler if outer.batch_sampler is None else outer.batch_sampler
            return partial(draws_of, indices, self._setup.population, ranks, at)
        plan = self._planner.plan(at)
        if is_first_on_node(ranks):
            cached.rekey(self._setup.policy, self._observer.scores, plan)
        if self.ahead is not None:
            self.ahead.begin(at, self._epochs is None or at.epoch + 1 < self._epochs)
        return partial(self._planner.draws, plan, at)

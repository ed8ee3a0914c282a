"""What an epoch of the Loader needs of torch: workers, tensors, and their generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from stoker.epoch.batch import BatchSpec
from stoker.epoch.cached import OnError
from stoker.epoch.controller import Begun
from stoker.epoch.cursor import Cursor, Walk
from stoker.epoch.ranks import LazyRanks
from stoker.epoch.session import Session
from stoker.epoch.state import RankState
from stoker.errors import ConfigError
from stoker.pytorch.batch_server import BatchServer
from stoker.pytorch.hand_over import private_collate
from stoker.pytorch.inner import InnerLoader
from stoker.pytorch.meta import Envelope, attach
from stoker.pytorch.observe import TensorObserver
from stoker.pytorch.plan_sampler import sampled_batch_specs

Rescore = Callable[[Any], Any]
"""The user's: takes a batch as the training loop gets it, and returns its losses ``[n]``."""


class Engine:
    """Feeds torch's workers the epochs that ``session`` takes them through.

    ``outer``, where a method takes it, is the user's loader, whose workers, collate function and
    order are used; it is not kept. Used by the training process only, from one thread.
    """

    def __init__(
        self,
        session: Session,
        ranks: LazyRanks,
        *,
        on_error: OnError,
        rescore: Rescore | None,
        returns_meta: bool,
    ) -> None:
        self.observer = TensorObserver(session.controller.observer)
        """Takes what training shows in tensors."""
        self.inner: InnerLoader | None = None
        """The torch loader that runs the workers."""
        self._session = session
        self._ranks = ranks
        self._on_error = on_error
        self._rescore = rescore
        self._returns_meta = returns_meta
        self._generator_began: torch.Tensor | None = None

    def begin_epoch(self, outer: DataLoader[Any]) -> tuple[Iterator[Envelope], Walk]:
        """Begin the coming epoch; return its envelopes, and where the training loop is in it."""
        session = self._session
        if self.inner is None or not outer.persistent_workers:
            self.inner = self._make_inner(outer)
        if outer.generator is not None:
            self._generator_began = outer.generator.get_state()
        own = None
        if not session.controller.settings.is_planned:
            own = partial(self._own_batch_specs, outer)
        begun = session.begin(outer.num_workers, self._rescorer(outer, self.inner), own)
        return iter(self.inner), begun.walk

    def is_redirected(self, walk: Walk) -> bool:
        """Whether ``set_epoch`` came after ``walk`` began, for another epoch."""
        controller = self._session.controller
        return walk is controller.walk and controller.planner.is_redirected(walk.start)

    def batches_from(self, outer: DataLoader[Any], at: Cursor) -> int:
        """Return this rank's batches of an epoch from ``at`` on."""
        controller, size = self._session.controller, outer.batch_size
        if controller.settings.is_planned:
            return controller.planner.batches(at)
        skipped = at.consumed // self._ranks.now().world_size // size if size else at.steps
        return DataLoader.__len__(outer) - skipped

    def add_stall(self, seconds: float, computed: float) -> None:
        """Count time that the training loop waited, of which its thread ``computed`` that much."""
        self._session.records.add_stall(seconds, computed)

    def receive(self, envelope: Envelope) -> Any:
        """Note what came, and return the batch as the training loop gets it."""
        controller = self._session.controller
        meta = controller.receive(envelope.meta, envelope.failures, envelope.missed)
        return attach(envelope.batch, meta) if self._returns_meta else envelope.batch

    def finish_epoch(self) -> None:
        """Close the books of the epoch in progress, if there is one."""
        self._session.controller.end()

    def save(self, outer: DataLoader[Any]) -> RankState:
        """Return the state of this rank; see ``Loader.state_dict``."""
        walk = self._session.controller.walk
        if walk is not None and outer.num_workers > 1 and not getattr(outer, "in_order", True):
            raise ConfigError(
                "batches that come out of order are no beginning of the epoch, so there is no "
                "state in the middle of it: take it between epochs, or leave out in_order=False"
            )
        generator = self._generator_began
        if walk is None and outer.generator is not None:
            generator = outer.generator.get_state()
        return self._session.save(None if generator is None else generator.numpy())

    def restore(self, outer: DataLoader[Any], state: RankState) -> None:
        """Continue from a state that is this loader's; see ``Loader.load_state_dict``."""
        self._session.restore(state)
        if outer.generator is not None and state.generator is not None:
            outer.generator.set_state(torch.from_numpy(state.generator))

    def close(self) -> None:
        """Let go of workers, prefetch and cache."""
        self.inner = None
        self._session.close()

    # --- inside ---

    def _make_inner(self, outer: DataLoader[Any]) -> InnerLoader:
        session = self._session
        cached = session.open(outer.num_workers)
        own = private_collate if outer.collate_fn is default_collate else outer.collate_fn
        server = BatchServer(
            cached,
            own,
            self._on_error,
            session.controller.settings.seed,
            session.progress,
            session.aside,
            session.past_the_cache(),
        )
        return InnerLoader(outer, server, session.requests)

    def _own_batch_specs(self, outer: DataLoader[Any], begun: Begun) -> Iterator[BatchSpec]:
        """Yield the batches that the user's sampler asks for."""
        indices: Any = outer.sampler if outer.batch_sampler is None else outer.batch_sampler
        population = self._session.setup.population
        return sampled_batch_specs(indices, population, self._ranks.now(), begun.walk.start)

    def _rescorer(
        self, outer: DataLoader[Any], inner: InnerLoader
    ) -> Callable[[NDArray[np.uint32], int], None] | None:
        """Return what has samples scored again by the user's function, if there is one."""
        rescore, session = self._rescore, self._session
        if rescore is None:
            return None

        def run(ids: NDArray[np.uint32], epoch: int) -> None:
            session.begin_aside(ids, epoch)
            for envelope in inner:
                self.observer.rescore(envelope.meta, rescore(envelope.batch))

        return run

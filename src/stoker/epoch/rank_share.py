"""The part of one rank in the plans of its job: what comes next, and its batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import SPARES, BatchSpec
from stoker.epoch.planner import Cursor, Planner, Walk
from stoker.epoch.ranks import LazyRanks
from stoker.epoch.settings import EpochSettings
from stoker.errors import ConfigError, warn_caller
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.scores import Scores
from stoker.store.claims import Claims
from stoker.store.tier import Keys

_PATIENCE = 10.0  # seconds that another rank may be behind when a state is saved


class Coming(NamedTuple):
    """The samples of a rank's batches, in order."""

    ids: NDArray[np.uint32]
    """``u32[A]``."""
    keys: Keys
    """``f64[A]``, those of each after its access; None: the policy needs none."""
    blocks: NDArray[np.uint32] | None
    """``u32[A]``, the block of each, where blocks are read at once."""
    before: Keys
    """``f64[A]``, the keys of samples of blocks until their access."""


class RankShare:
    """Takes this rank's share of the plans that ``planner`` makes, and knows which one is next.

    ``policy`` gives the keys of samples after an access, by ``scores`` as they change while
    training continues. Used by the training process only, from one thread.
    """

    def __init__(
        self,
        planner: Planner,
        ranks: LazyRanks,
        settings: EpochSettings,
        policy: Policy,
        scores: Scores,
    ) -> None:
        self.coming = Cursor()
        """Where the next iteration begins."""
        self._planner = planner
        self._ranks = ranks
        self._settings = settings
        self._policy = policy
        self._scores = scores
        self._told = False

    # --- what comes next ---

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; it resumes if it is the restored one.

        Otherwise the rest of the restored one is left out, with a warning. ConfigError for a
        negative epoch.
        """
        if epoch < 0:
            raise ConfigError(f"epoch={epoch}: epochs count from 0")
        self._told = True
        if epoch == self.coming.epoch:
            return
        if self.coming.consumed and self.batches(self.coming):
            warn_caller(
                f"set_epoch({epoch}) leaves out the rest of the restored epoch "
                f"{self.coming.epoch}: give set_epoch() that epoch to resume it"
            )
        self.coming = Cursor(int(epoch))

    def begin(self) -> Cursor:
        """Return the current cursor and advance the epoch."""
        begun = self.coming
        self.coming = Cursor(begun.epoch + 1)
        self._told = False
        return begun

    def resume(self, at: Cursor, served: NDArray[np.uint32] | None) -> None:
        """Make the next iteration resume from ``at``.

        ``served`` (``u32[at.consumed]``) is what the accesses before it were really served, in ids
        of the base data set; None: what the plan has there.
        """
        self.coming = Cursor(at.epoch)  # nothing is left out with a warning
        self.set_epoch(at.epoch)
        self.coming = at
        self._planner.note_served(at, served)

    def served(
        self, at: Cursor, walk: Walk | None, claims: Claims | None
    ) -> NDArray[np.uint32] | None:
        """Return what all ranks' accesses of the epoch before ``at`` were really served.

        ``u32[at.consumed]``, as :meth:`resume` takes it; None if that is what the plan has there.
        ``walk`` is the way through the epoch in progress, None between two; ``claims`` say who was
        served in it, where samples are served for one another.
        """
        planner = self._planner
        start = self.coming if walk is None else walk.start
        if walk is None:
            return planner.served(start) if planner.deviates(start) else None
        if claims is not None:
            # Other nodes say in their own states what they served.
            patience = _PATIENCE if claims.is_shared and planner.nodes is None else 0.0
            since = claims.logged(start.consumed, at.consumed, patience)
        elif planner.deviates(start):
            since = planner.plan(start).ids[: at.consumed - start.consumed]
        else:
            return None
        return np.concatenate([planner.served(start), since])

    def is_redirected(self, begun: Cursor) -> bool:
        """Whether :meth:`set_epoch` was called since ``begun`` began, and not for its epoch."""
        return self._told and (self.coming.epoch != begun.epoch or self.coming.consumed > 0)

    # --- counts ---

    def accesses(self, at: Cursor) -> int:
        """Return how many accesses of the epoch this rank has from ``at`` on."""
        rank, world_size = self._ranks.now()
        if (batches := self._planner.batches(at)) is not None:
            return int(np.diff(batches)[rank::world_size].sum())
        return len(range(rank, self._planner.left(at), world_size))

    def batches(self, at: Cursor) -> int:
        """Return how many batches of the epoch this rank has from ``at`` on."""
        if (batches := self._planner.batches(at)) is not None:
            rank, world_size = self._ranks.now()
            return len(range(rank, len(batches) - 1, world_size))
        return self._in_batches(self.accesses(at))

    def planned_batches(self, epochs: int) -> int:
        """Return how many batches this rank has in so many epochs, as far as can be foreseen."""
        if self._settings.grouping is not None:
            return sum(self.batches(Cursor(epoch)) for epoch in range(epochs))
        rank, world_size = self._ranks.now()
        lengths = self._planner.lengths(epochs)
        return sum(self._in_batches(len(range(rank, length, world_size))) for length in lengths)

    @property
    def most_accesses(self) -> int:
        """Accesses that this rank has at most in an epoch."""
        rank, world_size = self._ranks.now()
        if self._settings.grouping is not None:  # its batches may be those of the short samples
            return self._planner.most_places
        return len(range(rank, self._planner.longest, world_size))

    # --- accesses, and the keys of samples after them ---

    @property
    def reads_blocks(self) -> bool:
        """Whether plans have blocks of samples that are read at once."""
        return self._planner.reads_blocks

    def upcoming(self, at: Cursor) -> Coming:
        """Return the samples of this rank's batches from ``at`` on."""
        plan, scores = self._planner.plan(at), self._scores
        positions = self._own(plan, 0, self._batched(plan))
        ids = plan.ids[positions]
        keys = self._policy.keys(ids, scores, plan, positions)
        if plan.blocks is None:
            return Coming(ids, keys, None, None)
        before = self._policy.keys(ids, scores, plan, None)
        return Coming(ids, keys, plan.blocks[positions], before)

    def known(self, plan: Plan) -> tuple[NDArray[np.uint32], int]:
        """Return this rank's accesses of ``plan`` and of what follows, and how many are of it."""
        own = plan.ids[self._own(plan, 0, self._batched(plan))]
        later = plan.following
        if later is None:
            return own, len(own)
        after = later.ids[self._own(later, 0, self._batched(later))]
        return np.concatenate([own, after]), len(own)

    def later_keys(self, plan: Plan, first: int, end: int) -> Keys:
        """Return the keys after this rank's accesses ``first`` to ``end`` of ``plan``, by now."""
        positions = self._own(plan, first, end)
        return self._policy.keys(plan.ids[positions], self._scores, plan, positions)

    def earlier(self, at: Cursor) -> NDArray[np.uint32]:
        """Return the ids ``u32[n]`` of this rank's accesses of the epoch before ``at``."""
        if not at.consumed:
            return np.empty(0, np.uint32)
        plan = Plan(at.epoch, 0, self._planner.served(at))
        return plan.ids[self._own(plan)]

    def walk(self, plan: Plan, at: Cursor) -> Walk:
        """Return the training loop's way through ``plan``, which begins at ``at``."""
        world_size = self._ranks.now().world_size
        stride = (self._settings.batch_size or 1) * world_size
        return Walk(at, stride, at.consumed + len(plan), world_size, plan.batches)

    def indices(self) -> Iterator[int]:
        """Yield this rank's share of the coming iteration, in indices of the population's view."""
        order = self._planner.order(self.coming)
        return iter(order.ids[self._own(self._planner.with_ids(order))].tolist())

    def index_batches(self) -> Iterator[list[int]]:
        """Yield this rank's batches of the coming iteration, as :meth:`indices` does."""
        order = self._planner.order(self.coming)
        for positions in self._own_batches(order):
            yield order.ids[positions].tolist()

    def batch_specs(self, plan: Plan, at: Cursor) -> Iterator[BatchSpec]:
        """Yield this rank's batches of ``plan``, which begins at ``at``.

        One by one with ``batch_size=None``.
        """
        grouping = self._settings.grouping
        first, spares = 0, None if grouping is None else grouping.shortest(SPARES)
        for positions in self._own_batches(plan):
            wanted = plan.ids[positions]
            yield BatchSpec(
                wanted,
                at.consumed + positions,
                None if plan.weights is None else plan.weights[positions],
                self._policy.keys(wanted, self._scores, plan, positions),
                first=first,
                single=self._settings.batch_size is None,
                spares=spares,
            )
            first += len(positions)

    def rescoring_specs(self, ids: NDArray[np.uint32]) -> Iterator[BatchSpec]:
        """Yield the batches of this rank's part of ``ids`` ``u32[m]``, which are scored again.

        Parts are filled up to equal lengths, since the forward pass of a model that is wrapped for
        several ranks may talk to the others. Augmentation is that of the positions ``ids``.
        """
        (rank, world_size), batch_size = self._ranks.now(), self._settings.batch_size
        size = batch_size or 1
        own = np.resize(ids, -(-len(ids) // world_size) * world_size)
        own = np.ascontiguousarray(own[rank::world_size])
        for begin in range(0, len(own), size):
            part = own[begin : begin + size]
            positions = part.astype(np.int64)
            keys = self._policy.keys(part, self._scores, None, None)
            yield BatchSpec(part, positions, keys=keys, first=begin, single=batch_size is None)

    # --- inside ---

    def _own(self, plan: Plan, first: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return i64[n], positions in ``plan`` of this rank's accesses ``first`` to ``end``."""
        rank, world_size = self._ranks.now()
        if plan.batches is not None:
            return plan.batch_view(rank, world_size)[first:end]
        own = range(rank, len(plan), world_size)[first:end]
        if self._planner.locality is None:
            return np.arange(own.start, own.stop, own.step)
        return self._planner.divided_order(plan)[own.start : own.stop : own.step]

    def _own_batches(self, plan: Plan) -> Iterator[NDArray[np.int64]]:
        """Yield i64[n], the positions in ``plan`` of each of this rank's batches."""
        rank, world_size = self._ranks.now()
        if plan.batches is not None:
            own = range(rank, len(plan.batches) - 1, world_size)
            yield from (np.arange(*plan.batches[batch : batch + 2]) for batch in own)
            return
        plan.rank_view(rank, world_size, equal=self._settings.shuffle)  # refuses unequal parts
        size, end = self._settings.batch_size or 1, self._batched(plan)
        for begin in range(0, end, size):
            yield self._own(plan, begin, min(begin + size, end))

    def _in_batches(self, accesses: int) -> int:
        size = self._settings.batch_size or 1
        return accesses // size if self._settings.drop_last else -(-accesses // size)

    def _batched(self, plan: Plan) -> int:
        """Return this rank's accesses of ``plan`` that make it into a batch."""
        rank, world_size = self._ranks.now()
        if plan.batches is not None:
            return len(plan)
        accesses = len(range(rank, len(plan), world_size))
        return accesses - (
            accesses % (self._settings.batch_size or 1) if self._settings.drop_last else 0
        )

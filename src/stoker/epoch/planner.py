"""From the plan of an epoch to the batches of one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import BatchSpec
from stoker.epoch.cursor import Cursor, Walk
from stoker.epoch.ranks import LazyRanks, Locality, Nodes
from stoker.epoch.settings import EpochSettings, Population
from stoker.errors import ConfigError, warn_caller
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.recipes.base import SamplerFactory, uniform
from stoker.sampler.base import Sampler, as_sampler
from stoker.scores import Scores
from stoker.store.claims import still_due
from stoker.store.tier import Keys

log = logging.getLogger("stoker")


class Planner:
    """Makes the global plan of an epoch, and this rank's share of it.

    Plans are pure in seed, epoch and scores, so ranks that hold the same scores make the same
    one. What is left of an epoch from a cursor on is divided again, whatever the number of ranks
    before was.
    """

    def __init__(
        self,
        population: Population,
        make_sampler: SamplerFactory,
        ranks: LazyRanks,
        settings: EpochSettings,
        policy: Policy,
        scores: Scores,
    ) -> None:
        self.coming = Cursor()
        """Where the next iteration begins."""
        self._population = population
        self._make_sampler = self._make_now = make_sampler
        self._ranks = ranks
        self._settings = settings
        self._batch_size = settings.batch_size
        self._shuffle = settings.shuffle
        self._drop_last = settings.drop_last
        self._nodes: Nodes | None = None
        self._locality: Locality | None = None
        self._policy = policy
        self._scores = scores
        self._basis = population.scores(scores)
        self._lengths: dict[tuple[int, int, bool], int] = {}
        self._orders: dict[tuple[int, int, int], NDArray[np.int64]] = {}
        self._identity: tuple[int, str] | None = None
        self._resumed: tuple[Cursor, NDArray[np.uint32]] | None = None
        self._foreseen: Plan | None = None  # the order of an epoch to come
        self._samplers: dict[tuple[int, bool], Sampler] = {}
        self._told = False
        divided = self._divided()  # refuses what it must while the user's call is on the stack
        self.uses_scores = divided.uses_scores
        """Whether plans depend on scores, so that none can be made before its epoch begins."""
        self.without_accuracy = divided.without_accuracy
        """What becomes of plans where no accuracy is told; empty if that is no matter."""

    @property
    def nodes(self) -> Nodes | None:
        """Where ranks run, if that is on several nodes."""
        return self._nodes

    @property
    def locality(self) -> Locality | None:
        """Where samples are at home, if ranks are to prefer those of their node."""
        return self._locality

    def spread_over(self, nodes: Nodes, locality: Locality | None) -> None:
        """Plan for ranks on several nodes from now on; see :attr:`locality`."""
        self._nodes, self._locality = nodes, locality
        self._orders.clear()

    @property
    def latest(self) -> Scores:
        """The scores as they change while training continues."""
        return self._scores

    def check_step(self) -> None:
        """Raise ConfigError where a step of all ranks has more samples than a group of them."""
        step = (self._batch_size or 1) * self._ranks.now().world_size
        mixed = self._divided().mixed
        # All samples are no group.
        if mixed is not None and mixed < min(step, len(self._population)):
            raise ConfigError(
                f"a step of all ranks has {step} samples and a group {mixed}, so that each step "
                f"would have samples several times: give group={step / len(self._population):.3g} "
                "or more, or smaller batches"
            )

    # --- epochs ---

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
        """Return where the iteration begins that begins now; the next one takes a new epoch."""
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
        self._resumed = self._foreseen = None
        if served is not None:
            self.note_served(at, served)

    def note_served(self, at: Cursor, served: NDArray[np.uint32]) -> None:
        """Note what was really served before ``at``; see :meth:`resume`."""
        self._resumed = at, served
        self._orders.clear()

    def is_redirected(self, begun: Cursor) -> bool:
        """Whether :meth:`set_epoch` was called since ``begun`` began, and not for its epoch."""
        return self._told and (self.coming.epoch != begun.epoch or self.coming.consumed > 0)

    # --- what plans are made from ---

    def settle(self, scores: Scores, *, is_uniform: bool = False) -> None:
        """Make plans from ``scores``, a snapshot that all ranks hold alike, until the next call.

        ``is_uniform``: make uniform plans, since training does not play its part.
        """
        self._basis = self._population.scores(scores)
        make = uniform if is_uniform else self._make_sampler
        if make is not self._make_now:
            self._make_now, self._foreseen = make, None
            self._samplers.clear()
        self._forget()

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Let the sampler keep in ``scores``, of the base data set, what it draws from."""
        sampler = self._divided()
        sampler.begin_epoch(scores, epoch)
        if log.isEnabledFor(logging.INFO) and (told := sampler.describe(scores, epoch)):
            log.info("epoch %d: %s", epoch, told)

    # --- the whole job ---

    def order(self, at: Cursor) -> Plan:
        """Return the plan of the whole job from ``at`` on, in indices of the population's view.

        What was served before ``at`` in the place of other samples is left out, and those come.
        """
        sampler = self._divided()
        if not at.consumed:
            return sampler.plan(self._basis, at.epoch)
        whole = self._undivided(at.epoch)
        due = self._due(whole, at)
        left = self._left(at)
        # Filled up from the start of the epoch's order, or cut.
        places = np.concatenate([due, np.arange(max(0, left - len(due))) % len(whole)])[:left]
        weights = None if whole.weights is None else whole.weights[places]
        return Plan(at.epoch, at.epoch * sampler.longest + at.consumed, whole.ids[places], weights)

    def plan(self, at: Cursor) -> Plan:
        """Return the plan of the whole job from ``at`` on, in ids of the base data set.

        It knows the plan that follows if the cache policy looks ahead, and it is foreseen.
        """
        order, self._foreseen = self._foreseen, None  # let go of before another one is made
        if order is None or at.consumed or order.epoch != at.epoch:
            order = self.order(at)
        following = None
        if self._policy.looks_ahead and self._foresees(at.epoch + 1):
            self._foreseen = self.order(Cursor(at.epoch + 1))
            following = self._with_ids(self._foreseen, None)
        return self._with_ids(order, following)

    def whole(self, epoch: int) -> Plan:
        """Return the plan of the whole of ``epoch`` in ids of the base, divided by no ranks."""
        return self._with_ids(self._undivided(epoch), None)

    def is_whole(self, at: Cursor) -> bool:
        """Whether the plan from ``at`` on is that of the whole epoch, divided by no ranks."""
        return not at.consumed and self._ranks.now().world_size == 1 and not self._drop_last

    def served(self, at: Cursor) -> NDArray[np.uint32]:
        """Return u32[at.consumed], what all accesses before ``at`` were really served."""
        if not at.consumed:
            return np.empty(0, np.uint32)
        if self.deviates(at):
            assert self._resumed is not None
            return self._resumed[1]
        whole = self._undivided(at.epoch)
        return self._population.ids(whole.ids[np.arange(at.consumed) % len(whole)])

    def deviates(self, at: Cursor) -> bool:
        """Whether other samples than the plan has may have been served before ``at``."""
        return self._resumed is not None and self._resumed[0] == at

    def identity(self, epoch: int) -> str:
        """Return the identity of the plan of ``epoch`` before it is divided among ranks."""
        if self._identity is None or self._identity[0] != epoch:
            self._identity = epoch, self._undivided(epoch).identity
        return self._identity[1]

    def identity_from(self, scores: Scores, epoch: int, *, is_uniform: bool) -> str:
        """Return the identity that the plan of ``epoch`` would have if made from ``scores``."""
        before = self._basis, self._make_now
        try:
            self.settle(scores, is_uniform=is_uniform)
            return self.identity(epoch)
        finally:
            self._basis, self._make_now = before
            self._samplers.clear()
            self._forget()

    # --- this rank ---

    def accesses(self, at: Cursor) -> int:
        """Return how many accesses of the epoch this rank has from ``at`` on."""
        rank, world_size = self._ranks.now()
        return len(range(rank, self._left(at), world_size))

    def batches(self, at: Cursor) -> int:
        """Return how many batches of the epoch this rank has from ``at`` on."""
        return self._in_batches(self.accesses(at))

    def planned_batches(self, epochs: int) -> int:
        """Return how many batches this rank has in so many epochs, as far as can be foreseen."""
        rank, world_size = self._ranks.now()
        sampler = self._divided()
        lengths = (sampler.length_at(epoch) for epoch in range(epochs))
        return sum(self._in_batches(len(range(rank, length, world_size))) for length in lengths)

    @property
    def most_places(self) -> int:
        """Places that an epoch's plan of the whole job has at most, however it was divided."""
        return self._divided().longest + self._ranks.now().world_size

    @property
    def most_accesses(self) -> int:
        """Accesses that this rank has at most in an epoch."""
        rank, world_size = self._ranks.now()
        return len(range(rank, self._divided().longest, world_size))

    def upcoming(self, at: Cursor) -> tuple[NDArray[np.uint32], Keys]:
        """Return the samples of this rank's batches ``u32[n]``, and the keys after them."""
        plan = self.plan(at)
        positions = self._own(plan, 0, self._batched(plan))
        ids = plan.ids[positions]
        return ids, self._policy.keys(ids, self._scores, plan, positions)

    def later_keys(self, plan: Plan, first: int, end: int) -> Keys:
        """Return the keys after this rank's accesses ``first`` to ``end`` of ``plan``, by now."""
        positions = self._own(plan, first, end)
        return self._policy.keys(plan.ids[positions], self._scores, plan, positions)

    def keys(self, ids: NDArray[np.uint32]) -> Keys:
        """Return the keys of samples ``u32[n]`` by what is known now, whatever the plan."""
        return self._policy.keys(ids, self._scores, None, None)

    def earlier(self, at: Cursor) -> NDArray[np.uint32]:
        """Return the ids ``u32[n]`` of this rank's accesses of the epoch before ``at``."""
        if not at.consumed:
            return np.empty(0, np.uint32)
        plan = Plan(at.epoch, 0, self.served(at))
        return plan.ids[self._own(plan)]

    def elsewhere(self, plan: Plan) -> NDArray[np.uint32]:
        """Return the ids ``u32[n]`` of the accesses of ``plan`` that other nodes' ranks take."""
        if self._nodes is None:
            return np.empty(0, np.uint32)
        return plan.ids[self._nodes.elsewhere(self._order(plan))]

    def by_node(self, ids: NDArray[np.uint32], epoch: int) -> NDArray[np.uint32]:
        """Return ``ids`` ``u32[m]`` so that ranks which divide them get those of their node."""
        if self._locality is None:
            return ids
        return ids[self._locality.order(ids, self.super_epoch(epoch))]

    def super_epoch(self, epoch: int) -> int:
        """Return the epoch with which the super-epoch of ``epoch`` begins."""
        return self._divided().began(epoch)

    def walk(self, plan: Plan, at: Cursor) -> Walk:
        """Return the training loop's way through ``plan``, which begins at ``at``."""
        world_size = self._ranks.now().world_size
        stride = (self._batch_size or 1) * world_size
        return Walk(at, stride, at.consumed + len(plan), world_size)

    def indices(self) -> Iterator[int]:
        """Yield this rank's share of the coming iteration, in indices of the population's view."""
        order = self.order(self.coming)
        return iter(order.ids[self._own(self._with_ids(order, None))].tolist())

    def batch_specs(self, plan: Plan, at: Cursor) -> Iterator[BatchSpec]:
        """Yield this rank's batches of ``plan``, which begins at ``at``.

        One by one with ``batch_size=None``.
        """
        plan.rank_view(*self._ranks.now(), equal=self._shuffle)  # refuses unequal parts
        size, end = self._batch_size or 1, self._batched(plan)
        for begin in range(0, end, size):
            places = self._own(plan, begin, min(begin + size, end))
            wanted = plan.ids[places]
            yield BatchSpec(
                wanted,
                at.consumed + places,
                None if plan.weights is None else plan.weights[places],
                self._policy.keys(wanted, self._scores, plan, places),
                first=begin,
                single=self._batch_size is None,
            )

    # --- inside ---

    def _own(self, plan: Plan, first: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return i64[n], places in ``plan`` of this rank's accesses ``first`` to ``end``."""
        rank, world_size = self._ranks.now()
        own = range(rank, len(plan), world_size)[first:end]
        if self._locality is None:
            return np.arange(own.start, own.stop, own.step)
        return self._order(plan)[own.start : own.stop : own.step]

    def _order(self, plan: Plan) -> NDArray[np.int64]:
        """Return i64[A], the accesses of ``plan`` in the order that ranks divide."""
        locality = self._locality
        if locality is None:
            return np.arange(len(plan))
        key = plan.epoch, plan.start, len(plan)
        if key not in self._orders:
            if len(self._orders) > 3:
                self._orders.clear()
            self._orders[key] = locality.order(plan.ids, self.super_epoch(plan.epoch))
        return self._orders[key]

    def _foresees(self, epoch: int) -> bool:
        """Whether the plan of a later epoch is known; not while training plays no part in it."""
        if self.uses_scores and self._make_now is not self._make_sampler:
            return False
        return self._divided().foresees(self._basis, epoch)

    def _divided(self) -> Sampler:
        return self._sampler(self._ranks.now().world_size, drop_last=self._drop_last)

    def _sampler(self, pad_to: int, *, drop_last: bool) -> Sampler:
        key = pad_to, drop_last
        if key not in self._samplers:
            made = self._make_now(
                len(self._population),
                seed=self._settings.seed,
                shuffle=self._shuffle,
                pad_to=pad_to,
                drop_last=drop_last,
                epochs=self._settings.epochs,
            )
            self._samplers[key] = as_sampler(made)
        return self._samplers[key]

    def _undivided(self, epoch: int) -> Plan:
        """Return the plan that is filled up or cut for no number of ranks."""
        return self._sampler(1, drop_last=False).plan(self._basis, epoch)

    def _left(self, at: Cursor) -> int:
        """Return the accesses from ``at`` on of all ranks together, which divide them equally."""
        world_size = self._ranks.now().world_size
        if not at.consumed:
            return self._length(at.epoch, world_size, self._drop_last)
        left = max(0, self._length(at.epoch, 1, False) - at.consumed)
        if self._drop_last:
            return left - left % world_size
        return left + (-left % world_size if self._shuffle else 0)

    def _due(self, whole: Plan, at: Cursor) -> NDArray[np.int64]:
        """Return i64[n], the places of the undivided plan that are left from ``at`` on."""
        if not self.deviates(at):
            return np.arange(at.consumed, len(whole))
        return still_due(self._population.ids(whole.ids), at.consumed, self.served(at))

    def _forget(self) -> None:
        self._lengths.clear()
        self._orders.clear()
        self._identity = None

    def _in_batches(self, accesses: int) -> int:
        size = self._batch_size or 1
        return accesses // size if self._drop_last else -(-accesses // size)

    def _length(self, epoch: int, pad_to: int, drop_last: bool) -> int:
        key = epoch, pad_to, drop_last
        if key not in self._lengths:  # it may take a pass over all scores
            sampler = self._sampler(pad_to, drop_last=drop_last)
            self._lengths[key] = sampler.length_at(epoch, self._basis)
        return self._lengths[key]

    def _batched(self, plan: Plan) -> int:
        """Return this rank's accesses of ``plan`` that make it into a batch."""
        rank, world_size = self._ranks.now()
        accesses = len(range(rank, len(plan), world_size))
        return accesses - (accesses % (self._batch_size or 1) if self._drop_last else 0)

    def _with_ids(self, order: Plan, following: Plan | None) -> Plan:
        population = self._population
        if not population.label:
            return order.followed_by(following)
        beyond = None if order.beyond is None else population.spread(order.beyond)
        ids = population.ids(order.ids)
        return Plan(order.epoch, order.start, ids, order.weights, following, beyond)

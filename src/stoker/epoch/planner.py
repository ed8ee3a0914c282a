"""Plans of epochs for the whole job, positions in them, and the order in which they are divided."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.ranks import LazyRanks, Locality, Nodes
from stoker.epoch.settings import EpochSettings, Population
from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.recipes.base import SamplerFactory, uniform
from stoker.sampler.base import Sampler, as_sampler
from stoker.sampler.batching import BatchedSampler, for_ranks
from stoker.scores import Scores
from stoker.store.claims import still_due

log = logging.getLogger("stoker")


class Cursor(NamedTuple):
    """A position in training: an epoch, and how much of it the training loops of all ranks had.

    All ranks have handed out the same number of batches at a step, so what they had together is
    always the beginning of the global plan, and any number of ranks can resume from there.
    """

    epoch: int = 0
    consumed: int = 0
    """Samples handed out in the epoch, over all ranks."""
    steps: int = 0
    """Batches that each rank has handed out in it."""


class Walk:
    """The way of one rank's training loop through an epoch; a batch handed out is a step.

    ``start`` is where it begins, ``stride`` how many samples a step takes over all ranks, and
    ``end`` where the plan ends. With ``stride=None`` a step takes ``world_size`` times what this
    rank got. With ``batches``, those of the plan, a step takes ``world_size`` of them.
    """

    def __init__(
        self,
        start: Cursor,
        stride: int | None,
        end: int | None,
        world_size: int,
        batches: NDArray[np.int64] | None = None,
    ) -> None:
        self.start = start
        self._stride = stride
        self._end = end
        self._world_size = world_size
        self._batches = batches
        self._cursor = start

    @property
    def cursor(self) -> Cursor:
        """Where the training loop is now."""
        return self._cursor

    def after(self, batches: int | None) -> Cursor:
        """Return where the training loop was after so many batches; None: where it is now.

        Raises :class:`~stoker.errors.ConfigError` for more than were handed out, and for fewer
        where the order is the user's.
        """
        handed_out = self._cursor.steps - self.start.steps
        if batches is None or batches == handed_out:
            return self._cursor
        if not self._is_planned:
            raise ConfigError(
                f"batches={batches} and {handed_out} were handed out, by a sampler of your own: "
                "take the state before the next batch is drawn"
            )
        if not 0 <= batches < handed_out:
            raise ConfigError(f"batches={batches}: {handed_out} were handed out in this iteration")
        return self._planned(batches)

    def step(self, samples: int) -> None:
        """Count a batch of so many samples that the training loop got."""
        if self._is_planned:
            self._cursor = self._planned(self._cursor.steps - self.start.steps + 1)
            return
        consumed = self._cursor.consumed + samples * self._world_size
        self._cursor = Cursor(self.start.epoch, consumed, self._cursor.steps + 1)

    @property
    def _is_planned(self) -> bool:
        return self._stride is not None and self._end is not None

    def _planned(self, batches: int) -> Cursor:
        """Return where the training loop is after so many batches of the plan."""
        assert self._stride is not None and self._end is not None
        if self._batches is None:
            # The stride, not this rank's samples: the last batch of another rank may be longer.
            consumed = min(self.start.consumed + batches * self._stride, self._end)
        else:
            end = self._batches[min(batches * self._world_size, len(self._batches) - 1)]
            consumed = self.start.consumed + int(end)
        return Cursor(self.start.epoch, consumed, self.start.steps + batches)


class Planner:
    """Makes the global plans of epochs.

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
        self._population = population
        self._make_sampler = self._make_now = make_sampler
        self._ranks = ranks
        self._settings = settings
        self._drop_last = settings.drop_last
        self._nodes: Nodes | None = None
        self._locality: Locality | None = None
        self._policy = policy
        self._basis = population.scores(scores)
        self._lengths: dict[tuple[int, int, bool], int] = {}
        self._orders: dict[tuple[int, int, int], NDArray[np.int64]] = {}
        self._batches: dict[tuple[int, int, int], NDArray[np.int64]] = {}
        self._identity: tuple[int, str] | None = None
        self._resumed: tuple[Cursor, NDArray[np.uint32]] | None = None
        self._foreseen: Plan | None = None  # the order of an epoch to come
        self._samplers: dict[tuple[int, bool], Sampler] = {}
        divided = self._divided()  # refuses what it must while the user's call is on the stack
        self.uses_scores = divided.uses_scores
        """Whether plans depend on scores, so that none can be made before its epoch begins."""
        self.reads_blocks = divided.reads_blocks
        """Whether plans have blocks of samples that are read at once."""
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

    def check_step(self) -> None:
        """Raise ConfigError where a step of all ranks may have a sample twice by design."""
        step = (self._settings.batch_size or 1) * self._ranks.now().world_size
        apart = self._divided().apart
        if apart is not None and apart < min(step, len(self._population)):
            raise ConfigError(
                f"a step of all ranks has {step} samples, and the plan has a sample again after "
                f"{apart} accesses, so that a step could have it twice: give a longer window=, "
                "or smaller batches"
            )

    def note_served(self, at: Cursor, served: NDArray[np.uint32] | None) -> None:
        """Note what was really served before ``at``, where training resumes.

        ``u32[at.consumed]``, in ids of the base data set; None: what the plan has there.
        """
        self._resumed = None if served is None else (at, served)
        self._foreseen = None
        self._orders.clear()

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

    def plan_by(self, make_sampler: SamplerFactory) -> SamplerFactory:
        """Make plans by another sampler from now on; return what made the one before."""
        before = self._make_sampler
        if self._make_now is before:
            self._make_now = make_sampler
        self._make_sampler, self._foreseen = make_sampler, None
        self._samplers.clear()
        self._forget()
        return before

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
        sampler, batches = self._divided(), self.batches(at)
        if not at.consumed and batches is None:
            return sampler.plan(self._basis, at.epoch)
        whole = self._undivided(at.epoch)
        due = self._due(whole, at)
        left = self.left(at)
        # Filled up from the start of the epoch's order, or cut.
        positions = np.concatenate([due, np.arange(max(0, left - len(due))) % len(whole)])[:left]
        return whole.part(positions, at.epoch * sampler.longest + at.consumed, batches)

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
            following = self.with_ids(self._foreseen, None)
        return self.with_ids(order, following)

    def whole(self, epoch: int) -> Plan:
        """Return the plan of the whole of ``epoch`` in ids of the base, divided by no ranks."""
        return self.with_ids(self._undivided(epoch), None)

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

    def with_ids(self, order: Plan, following: Plan | None = None) -> Plan:
        """Return an order in ids of the base data set, with what follows it."""
        population = self._population
        if not population.label:
            return order.followed_by(following)
        return Plan(
            order.epoch,
            order.start,
            population.ids(order.ids),
            order.weights,
            following,
            None if order.beyond is None else population.spread(order.beyond),
            order.repeats,
            order.blocks,
            order.batches,
        )

    # --- how ranks divide it ---

    def left(self, at: Cursor) -> int:
        """Return the accesses from ``at`` on of all ranks together, which divide them equally."""
        world_size = self._ranks.now().world_size
        if (batches := self.batches(at)) is not None:
            return int(batches[-1])
        if not at.consumed:
            return self._length(at.epoch, world_size, self._drop_last)
        left = max(0, self._length(at.epoch, 1, False) - at.consumed)
        if self._drop_last:
            return left - left % world_size
        return left + (-left % world_size if self._settings.shuffle else 0)

    def batches(self, at: Cursor) -> NDArray[np.int64] | None:
        """Return i64[B + 1], the batches from ``at`` on, which ranks divide: :attr:`Plan.batches`.

        None where a batch has a fixed number of samples.
        """
        if self._settings.grouping is None:
            return None
        key = at.epoch, at.consumed, self._ranks.now().world_size
        if key not in self._batches:
            bounds = self._undivided(at.epoch).batches
            assert bounds is not None
            done = min(at.consumed, int(bounds[-1]))
            left = np.append(0, bounds[bounds > done] - done)
            fill, drop_last = self._settings.shuffle, self._drop_last
            divided = for_ranks(left, key[-1], drop_last=drop_last, fill=fill)
            if not at.consumed and len(divided) < 2:
                raise ConfigError(
                    f"drop_last leaves none of {len(left) - 1} batches to {key[-1]} ranks: use "
                    "fewer ranks or drop_last=False"
                )
            self._batches[key] = divided
        return self._batches[key]

    @property
    def most_places(self) -> int:
        """Positions that an epoch's plan of the whole job has at most, however it was divided."""
        return self._divided().longest + self._ranks.now().world_size

    def lengths(self, epochs: int) -> Iterator[int]:
        """Yield the accesses of all ranks in each of so many epochs, as far as can be foreseen."""
        sampler = self._divided()
        return map(sampler.length_at, range(epochs))

    @property
    def longest(self) -> int:
        """Accesses that all ranks have at most in an epoch."""
        return self._divided().longest

    def divided_order(self, plan: Plan) -> NDArray[np.int64]:
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

    def elsewhere(self, plan: Plan) -> NDArray[np.uint32]:
        """Return the ids ``u32[n]`` of the accesses of ``plan`` that other nodes' ranks take."""
        if self._nodes is None:
            return np.empty(0, np.uint32)
        return plan.ids[self._nodes.elsewhere(self.divided_order(plan))]

    def by_node(self, ids: NDArray[np.uint32], epoch: int) -> NDArray[np.uint32]:
        """Return ``ids`` ``u32[m]`` so that ranks which divide them get those of their node."""
        if self._locality is None:
            return ids
        return ids[self._locality.order(ids, self.super_epoch(epoch))]

    def super_epoch(self, epoch: int) -> int:
        """Return the epoch with which the super-epoch of ``epoch`` begins."""
        return self._divided().began(epoch)

    # --- inside ---

    def _foresees(self, epoch: int) -> bool:
        """Whether the plan of a later epoch is known; not while training plays no part in it."""
        if self.uses_scores and self._make_now is not self._make_sampler:
            return False
        return self._divided().foresees(self._basis, epoch)

    def _divided(self) -> Sampler:
        return self._sampler(self._ranks.now().world_size, drop_last=self._drop_last)

    def _sampler(self, pad_to: int, *, drop_last: bool) -> Sampler:
        grouping = self._settings.grouping
        key = (pad_to, drop_last) if grouping is None else (1, False)  # ranks divide batches
        if key not in self._samplers:
            made = self._make_now(
                len(self._population),
                seed=self._settings.seed,
                shuffle=self._settings.shuffle,
                pad_to=key[0],
                drop_last=key[1],
                epochs=self._settings.epochs,
            )
            sampler = as_sampler(made)
            self._samplers[key] = sampler if grouping is None else BatchedSampler(sampler, grouping)
        return self._samplers[key]

    def _undivided(self, epoch: int) -> Plan:
        """Return the plan that is filled up or cut for no number of ranks."""
        return self._sampler(1, drop_last=False).plan(self._basis, epoch)

    def _due(self, whole: Plan, at: Cursor) -> NDArray[np.int64]:
        """Return i64[n], the positions of the undivided plan that are left from ``at`` on."""
        if not self.deviates(at):
            return np.arange(at.consumed, len(whole))
        return still_due(self._population.ids(whole.ids), at.consumed, self.served(at))

    def _forget(self) -> None:
        self._lengths.clear()
        self._batches.clear()
        self._orders.clear()
        self._identity = None

    def _length(self, epoch: int, pad_to: int, drop_last: bool) -> int:
        key = epoch, pad_to, drop_last
        if key not in self._lengths:  # it may take a pass over all scores
            sampler = self._sampler(pad_to, drop_last=drop_last)
            self._lengths[key] = sampler.length_at(epoch, self._basis)
        return self._lengths[key]

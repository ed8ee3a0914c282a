"""One training of a replay: its epochs, planned, served and scored by the parts of training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.epoch.batch import ServedBatch
from stoker.epoch.controller import Begun, Controller, Opened
from stoker.epoch.ranks import LazyRanks, launched_ranks
from stoker.epoch.settings import EpochSettings, Population
from stoker.errors import ConfigError
from stoker.importance.base import as_scorer
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.policy.next_use import NextUse
from stoker.policy.score import ByScore
from stoker.recipes import Recipe
from stoker.sampler.base import Sampler, as_sampler
from stoker.sampler.super_epochs import Room
from stoker.scores import Scores
from stoker.sim.clock import Clock, Conditions
from stoker.sim.played import Visits, comes_again
from stoker.sim.replayed_cache import Outcomes, ReplayedAhead, ReplayedCache
from stoker.sim.result import EpochResult, Tally
from stoker.sim.signals import Losses, MadeUpLosses
from stoker.store.claims import Served
from stoker.store.tier import Keys
from stoker.types import Outcome

_RUN = 1 << 14  # accesses at once: their keys take little memory, and calls little time
_WAITING = 3  # runs handed to the thread that serves, which so has never to wait for one
_BATCHES = 8  # counted at once: the thread that does so takes turns with the one that serves

_HIT, _FETCHED = np.int8(Outcome.HIT), np.int8(Outcome.FETCHED)
_SUBSTITUTED = np.int8(Outcome.SUBSTITUTED)


class Step(NamedTuple):
    """A batch that was served."""

    plan: Plan
    positions: NDArray[np.int64]
    """``i64[n]``, its accesses in the plan."""
    served: Served


class _Shown(NamedTuple):
    """A batch that was served, and the losses that training saw; None if scores need none."""

    served: NDArray[np.uint32]
    hits: NDArray[np.bool_]
    losses: NDArray[np.float64] | None


class Accesses:
    """Recorded accesses, epoch by epoch."""

    def __init__(self, epochs: Sequence[ArrayLike], num_samples: int) -> None:
        self._ids = [np.asarray(ids) for ids in epochs]
        for ids in self._ids:
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise ConfigError(f"a trace of {ids.shape}, {ids.dtype}: give [A] ids")
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < num_samples:
                raise ConfigError(
                    f"the trace has ids from {ids.min()} to {ids.max()}: there are {num_samples}"
                )
        self._starts = np.cumsum([0, *map(len, self._ids)]).tolist()

    def __len__(self) -> int:
        return len(self._ids)

    def plan(self, epoch: int) -> Plan:
        """Return the accesses of ``epoch``; those of the next one follow if there is one."""
        is_last = epoch + 1 == len(self._ids)
        return self._plan(epoch, None if is_last else self._plan(epoch + 1, None))

    def _plan(self, epoch: int, following: Plan | None) -> Plan:
        ids = self._ids[epoch].astype(np.uint32)
        again = comes_again(ids)
        return Plan(epoch, self._starts[epoch], ids, None, following, repeats=again)


class _ReplayedSampler(Sampler):
    """A recipe's sampler, or recorded accesses in its place.

    Plans have no weights, and expectations only if ``policy`` looks ahead: of 100 million samples
    either take half a gigabyte.
    """

    def __init__(self, own: Sampler, policy: Policy, accesses: Accesses | Visits | None) -> None:
        self._own, self._policy, self._accesses = own, policy, accesses

    @property
    def uses_scores(self) -> bool:
        """Whether the recipe's does."""
        return self._own.uses_scores

    @property
    def longest(self) -> int:
        """Accesses of the recipe's longest plan."""
        return self._own.longest

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return the accesses of the recipe's plan, or of the record."""
        if self._accesses is None:
            return self._own.length_at(epoch, scores)
        return len(self.plan(scores, epoch))

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Keep in ``scores`` what the recipe's sampler draws from."""
        self._own.begin_epoch(scores, epoch)

    def foresees(self, scores: Scores | None, epoch: int) -> bool:
        """Whether the plan of ``epoch`` is known already."""
        if self._accesses is None:
            return self._own.foresees(scores, epoch)
        return epoch < len(self._accesses)

    def describe(self, scores: Scores | None, epoch: int) -> str:
        """Return what the recipe's does in ``epoch``."""
        return self._own.describe(scores, epoch)

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the accesses of ``epoch``."""
        if self._accesses is None:
            plan = self._own.plan(scores, epoch)
        else:
            plan = self._accesses.plan(epoch).followed_by(None)
        return plan.unweighted(foreseeing=self._policy.looks_ahead)


class Job:
    """One training: plans, serves and scores its epochs one after the other.

    ``cache`` was made for ``recipe``; it is not closed. ``accesses``: those of each epoch, in place
    of the sampler's. ``lag``: batches served before the losses of one are known.
    """

    def __init__(
        self,
        recipe: Recipe,
        cache: ReplayedCache,
        losses: Losses,
        epochs: int,
        batch_size: int,
        seed: int,
        accesses: Accesses | Visits | None = None,
        *,
        lag: int = 0,
    ) -> None:
        count, policy = len(cache.sizes), cache.policy
        self.cache = cache
        self._losses = losses
        self._batch_size, self._seed = batch_size, seed
        self._epoch = 0  # the next one
        own = recipe.sampler_for(Room(cache.sizes, cache.capacity))(
            count, seed=seed, shuffle=True, pad_to=1, drop_last=False, epochs=epochs
        )
        made = as_sampler(own)
        self._reads_blocks = made.reads_blocks
        if made.reads_blocks and not cache.window:
            raise ConfigError(
                f"recipe {recipe.name!r} cannot be simulated so: it reads blocks of samples ahead, "
                "give replay() read_ahead= bytes for that"
            )
        sampler = _ReplayedSampler(made, policy, accesses)
        self._knows_next = not sampler.uses_scores
        self._is_scored = sampler.uses_scores or _reads_scores(policy, recipe)
        scorer = as_scorer(recipe.scorer(count))
        if self._is_scored and (unknown := scorer.needs - {"losses"}):
            raise ConfigError(
                f"recipe {recipe.name!r} cannot be simulated: its scorer needs "
                f"{', '.join(sorted(unknown))}, and a replay has losses only"
            )
        scorer.cache_holds(round(cache.capacity / float(cache.sizes.mean())))
        self._scores = Scores(count if self._is_scored else 1)  # else not asked for
        settings = EpochSettings(
            seed=seed,
            epochs=epochs,
            batch_size=batch_size,
            needs_scores=self._is_scored,
            is_resumable=False,
        )
        self._controller = Controller(
            settings,
            Population(count),
            lambda *_, **__: sampler,
            policy,
            self._scores,
            scorer,
            ranks=LazyRanks(0, 1, launched_ranks),
        )
        self._ahead = ReplayedAhead(cache, self._controller.share) if cache.window else None
        self._controller.open(Opened(cache, ahead=self._ahead))
        self._lag = lag
        self._clock: Clock | None = None

    def keep_time(self, conditions: Conditions, sizes: NDArray[np.int64]) -> None:
        """Have the time of each epoch computed, if samples ``sizes`` long (``i64[N]``) are read.

        Raises :class:`~stoker.errors.ConfigError` for recipes that read blocks.
        """
        if self._reads_blocks:
            raise ConfigError(
                "what it takes to read blocks cannot be simulated, only what is read: leave "
                "conditions out (benchmarks/block.py counts requests)"
            )
        self._clock = Clock(conditions, sizes, knows_next=self._knows_next, seed=self._seed)
        self._asked_at, self._reads_a_second = 0.0, conditions.reads_a_second(float(sizes.mean()))

    def run(self) -> EpochResult:
        """Run the next epoch; return what was counted."""
        begun = self._begin()
        if self.cache.serves_runs:
            return self._run_at_once(begun)
        if self._swaps_runs(begun):
            return self._run_swapping(begun)
        if self.cache.serves_stand_ins and self._is_scored:
            return self._run_by_batch(begun)
        steps = self._steps(begun)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: EpochResult = end.value
                return result

    def steps(self) -> Generator[Step, None, EpochResult]:
        """Run the next epoch, and yield each of its batches; return what was counted."""
        return (yield from self._steps(self._begin()))

    def _begin(self) -> Begun:
        """Begin the next epoch, while its losses are drawn."""
        if self._is_scored and isinstance(self._losses, MadeUpLosses):
            self._losses.begin_epoch(self._epoch)
        self._epoch += 1
        return self._controller.begin({}, self._rescore)

    def _steps(self, begun: Begun) -> Generator[Step, None, EpochResult]:
        """Run the epoch that was begun, likewise."""
        cache, ahead = self.cache, self._ahead
        assert begun.plan is not None
        epoch, reads = begun.plan.epoch, cache.package_reads
        before = 0 if ahead is None else ahead.num_read
        tally, right = Tally(epoch, self.cache.sizes), _Right()
        unscored: deque[ServedBatch] = deque()
        for number, spec in enumerate(self._controller.batch_specs(begun)):
            if ahead is None:
                alone = cache.may_be_served_by_others(spec.ids)
            else:
                alone = ~ahead.read(spec.ids, self._could_be_read())
            served = cache.serve(spec.ids, spec.keys)
            if ahead is not None:
                fetched = int(np.count_nonzero(served.outcomes == Outcome.FETCHED))
                ahead.served(spec, epoch, fetched)
            tally.add(served.ids, served.outcomes)
            if self._clock is not None:
                packages = cache.take_package_reads()
                self._clock.add(served.ids, served.outcomes, *packages, alone=alone)
            if self._is_scored:
                ids = served.ids
                unscored.append(ServedBatch(number, epoch, ids, served.outcomes, spec.positions))
                if len(unscored) > self._lag:
                    self._observe(unscored.popleft(), right)
            yield Step(begun.plan, spec.positions, served)
        for batch in unscored:
            self._observe(batch, right)
        read = 0 if ahead is None else ahead.num_read - before
        return self._end(tally, right, cache.package_reads - reads, read)

    def _could_be_read(self) -> float:
        """Return how many samples storage gives in the time that has passed since the last call."""
        if self._clock is None:
            return math.inf
        passed, self._asked_at = self._clock.now - self._asked_at, self._clock.now
        return passed * self._reads_a_second

    def _observe(self, batch: ServedBatch, right: _Right) -> None:
        losses = self._losses(batch.ids, batch.epoch)
        self._controller.receive(batch)
        self._controller.observe({"losses": losses})
        right.add(losses)

    def _run_at_once(self, begun: Begun) -> EpochResult:
        """Run an epoch in runs of batches: what :meth:`steps` does, where none stands in.

        What is served is what the plan says, so that scores do not depend on what is cached.
        """
        plan = begun.plan
        assert plan is not None
        tally, right = Tally(plan.epoch, self.cache.sizes), _Right()
        self._serve_plan(plan, tally, right)
        return self._end(tally, right, 0)

    @property
    def _span(self) -> int:
        """Accesses of a run, which has whole batches."""
        return max(1, _RUN // self._batch_size) * self._batch_size

    def _serve_plan(self, plan: Plan, tally: Tally, right: _Right) -> None:
        """Serve a plan, which is not needed afterwards.

        A thread walks the cache through a run while the next one is scored here, and the one before
        is counted: neither depends on what hits.
        """
        span = self._span
        with ThreadPoolExecutor(1) as thread:
            served: tuple[NDArray[np.uint32], Future[Outcomes]] | None = None
            for start in range(0, len(plan), span):
                positions = np.arange(start, min(start + span, len(plan)))
                ids = plan.ids[start : start + span]
                if self._is_scored:
                    keys, after = self._score_run(ids, plan, positions, right)
                else:
                    keys, after = self.cache.policy.keys(ids, self._scores, plan, positions), None
                outcomes = thread.submit(self.cache.serve_run, ids, keys, after, self._batch_size)
                if served is not None:
                    self._count_run(tally, *served)
                served = ids, outcomes
            if served is not None:
                self._count_run(tally, *served)

    def _swaps_runs(self, begun: Begun) -> bool:
        """Whether :meth:`_run_swapping` can serve the epoch."""
        plan, scorer = begun.plan, self._controller.observer.scorer
        if plan is None or self._clock is not None or self._lag or not self.cache.swaps_runs:
            return False
        are_known = not self._is_scored or scorer.scores_are_losses
        return are_known and plan.is_once_each

    def _run_swapping(self, begun: Begun) -> EpochResult:
        """Run an epoch in runs of batches, in which samples stand in for others.

        What is served depends on what is cached; but each sample is served once, and its score
        after that is known beforehand. So a thread walks the cache through a run while the one
        before is scored here.
        """
        plan, cache, batch = begun.plan, self.cache, self._batch_size
        assert plan is not None
        tally, right, reads = Tally(plan.epoch, cache.sizes), _Right(), cache.package_reads
        cache.begin_swaps()
        span = self._span
        starts = range(0, len(plan), span)
        with ThreadPoolExecutor(1) as thread:
            ahead = (
                (ids, thread.submit(cache.serve_swaps, ids, *keys, batch))
                for ids, keys in (self._asked_for(plan, slice(at, at + span)) for at in starts)
            )
            coming = deque(islice(ahead, _WAITING))
            while coming:
                asked, run = coming.popleft()
                ids, outcomes = run.result()
                coming.extend(islice(ahead, 1))
                tally.add(ids, outcomes)
                cache.note_swaps(asked, ids, outcomes)
                if self._is_scored:
                    losses = self._losses(ids, plan.epoch)
                    self._controller.observer.score_run(ids, plan.epoch, losses, batch)
                    self._count_losses(losses, right)
        return self._end(tally, right, cache.package_reads - reads)

    def _asked_for(self, plan: Plan, part: slice) -> tuple[NDArray[np.uint32], tuple[Keys, Keys]]:
        """Return a run of ``plan``, and the keys of its samples before and after their access."""
        ids, policy = plan.ids[part], self.cache.policy
        if policy.natural_keys:
            return ids, (None, None)
        # Of a sample that comes once, the score does not change before its own access.
        before = policy.keys(ids, self._scores, plan, np.arange(part.start, part.start + len(ids)))
        return ids, (before, self._losses(ids, plan.epoch))

    def _count_losses(self, losses: NDArray[np.float64], right: _Right) -> None:
        self._controller.observer.add_losses(losses)
        right.add(losses)

    def _count_run(self, tally: Tally, ids: NDArray[np.uint32], outcomes: Future[Outcomes]) -> None:
        tally.add(ids, outcomes.result())
        if self._clock is not None:
            self._clock.add_run(ids, outcomes.result(), self._batch_size)

    def _score_run(
        self, ids: NDArray[np.uint32], plan: Plan, positions: NDArray[np.int64], right: _Right
    ) -> tuple[Keys, Keys]:
        """Score a run of batches; return their keys before, and after if they follow scores."""
        policy, batch, observer = self.cache.policy, self._batch_size, self._controller.observer
        losses = self._losses(ids, plan.epoch)
        # Where no sample comes twice, its own score does not change before its access, nor after;
        # and some keys do not depend on scores. Else those of a batch follow from the one before.
        alone = isinstance(policy, ByScore) and plan.is_once_each
        at_once = alone or isinstance(policy, NextUse) or policy.natural_keys
        before: list[Keys] = []
        after: list[Keys] = []
        size = len(ids) if at_once else batch
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            before.append(policy.keys(ids[part], self._scores, plan, positions[part]))
            observer.score_run(ids[part], plan.epoch, losses[part], batch)
            if self.cache.follows_scores:
                after.append(policy.keys(ids[part], self._scores, plan, None))
        self._count_losses(losses, right)
        return _joined(before), _joined(after)

    def _run_by_batch(self, begun: Begun) -> EpochResult:
        """Run an epoch batch by batch: what :meth:`steps` does, where key samples stand in.

        Who does depends on the scores of the batch before. A thread counts what was served.
        """
        plan = begun.plan
        assert plan is not None
        tally, right = Tally(plan.epoch, self.cache.sizes), _Right()
        with ThreadPoolExecutor(1) as thread:
            counted: Future[None] | None = None
            for start in range(0, len(plan), self._batch_size * _BATCHES):
                end = min(start + self._batch_size * _BATCHES, len(plan))
                shown = [self._show(plan, at, end) for at in range(start, end, self._batch_size)]
                if counted is not None:
                    counted.result()
                part = plan.epoch, plan.ids[start:end], shown
                counted = thread.submit(self._count_shown, *part, tally, right)
            if counted is not None:
                counted.result()
        return self._end(tally, right, 0)

    def _show(self, plan: Plan, start: int, end: int) -> _Shown:
        """Serve the batch of ``plan`` that begins at ``start``, and have it scored."""
        cache, observer = self.cache, self._controller.observer
        end = min(start + self._batch_size, end)
        served, hits = cache.serve_batch(plan, start, end, self._scores)
        losses = self._losses(served, plan.epoch) if observer.scorer.needs else None
        observer.score(served, plan.epoch, {} if losses is None else {"losses": losses})
        cache.follow(served, observer.scorer.neighbours, self._scores)
        return _Shown(served, hits, losses)

    def _count_shown(
        self,
        epoch: int,
        asked: NDArray[np.uint32],
        shown: list[_Shown],
        tally: Tally,
        right: _Right,
    ) -> None:
        """Count batches of an epoch, of which ``asked`` were asked for, ``u32[n]``."""
        served = np.concatenate([batch.served for batch in shown])
        outcomes = np.where(np.concatenate([batch.hits for batch in shown]), _HIT, _FETCHED)
        outcomes[served != asked] = _SUBSTITUTED
        tally.add(served, outcomes)
        known = [batch.losses for batch in shown if batch.losses is not None]
        losses = np.concatenate(known) if known else self._losses(served, epoch)
        for start in range(0, len(asked), self._batch_size):
            batch = slice(start, start + self._batch_size)
            self._count_losses(losses[batch], right)
            if self._clock is not None:
                self._clock.add(served[batch], outcomes[batch])

    def _end(
        self, tally: Tally, right: _Right, package_reads: int, read_ahead: int = 0
    ) -> EpochResult:
        """Write down what is known of an epoch; return what was counted."""
        self._controller.end(right.accuracy)
        time = None if self._clock is None else self._clock.end_epoch()
        return tally.result(package_reads, time, read_ahead)

    def _rescore(self, ids: NDArray[np.uint32], epoch: int) -> None:
        """Score samples again by the losses that they have as the epoch begins."""
        self._controller.observer.rescore(ids, epoch, {"losses": self._losses(ids, epoch)})


def _reads_scores(policy: Policy, recipe: Recipe) -> bool:
    """Whether the cache asks for scores; a policy with keys of its own may, but for next use."""
    by_scores = not policy.natural_keys and not isinstance(policy, NextUse)
    return by_scores or policy.has_places or recipe.shares is not None


def _joined(parts: list[Keys]) -> Keys:
    """Return ``f64[n]``, the keys of all parts; None where there are none."""
    known = [keys for keys in parts if keys is not None]
    return np.concatenate(known) if known else None


class _Right:
    """How often a model with such losses is right, over an epoch."""

    def __init__(self) -> None:
        self._count, self._right = 0, 0.0

    def add(self, losses: NDArray[np.float64]) -> None:
        self._count += len(losses)
        self._right += float(np.exp(-losses).sum())

    @property
    def accuracy(self) -> float:
        """Mean probability of the right class, e^-loss for cross entropy; NaN without losses."""
        return self._right / self._count if self._count else math.nan

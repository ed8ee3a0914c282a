"""One rank's epochs: begun, observed, ended, saved and restored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import BatchSpec, Failure, ServedBatch
from stoker.epoch.observer import Arrived, Followers, Observer, Signals
from stoker.epoch.placing import EpochCache
from stoker.epoch.planner import Cursor, Planner, Walk
from stoker.epoch.rank_share import RankShare
from stoker.epoch.ranks import (
    AgreedRescore,
    Agreement,
    Alone,
    Collective,
    Ended,
    LazyRanks,
    put_together,
    scores_of,
)
from stoker.epoch.read_ahead import Ahead, DirectReading
from stoker.epoch.records import Records
from stoker.epoch.settings import EpochSettings, Population
from stoker.epoch.state import OWN_ORDER, Owner, RankState
from stoker.epoch.stats import Stats
from stoker.epoch.tracing import Tracer
from stoker.errors import ConfigError
from stoker.importance.base import Scorer
from stoker.importance.baselines import SelectiveBackward
from stoker.jobs.member import Member
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.recipes.base import SamplerFactory
from stoker.scores import Scores

Rescore = Callable[[NDArray[np.uint32], int], None]
"""Has samples ``u32[m]``, whose order ranks divide, scored again before an epoch is planned."""

_NONE = np.empty(0, np.uint32)
_NO_POSITIONS = np.empty(0, np.int64)

_Batch = TypeVar("_Batch", bound=ServedBatch)


@dataclass(frozen=True)
class Opened:
    """What epochs run on once the cache is open; the controller closes none of it."""

    cache: EpochCache
    counters: Callable[[], Mapping[str, Any]] | None = None
    """Returns counts by name: ``Store.stats()``, and more of :class:`~stoker.epoch.stats.Stats`."""
    ahead: Ahead | None = None
    """Prefetch, where there is any."""
    direct: DirectReading | None = None
    """Who says what is read past the cache, where that may be."""
    member: Member | None = None
    """This job among those that share the cache."""
    tracer: Tracer | None = None
    """Who writes down what happens, where that was asked for."""


class Begun(NamedTuple):
    """An epoch that begins, or what is left of it."""

    walk: Walk
    """Where the training loop is in it."""
    plan: Plan | None
    """Of all ranks, from there on; None in an order of the user's."""
    earlier: NDArray[np.uint32]
    """``u32[n]``, what this rank was given in it before."""
    bare: int
    """Batches at its start to read past the cache, to measure what that is worth."""


class Controller:
    """Takes one rank through its epochs, whatever framework trains and whatever serves batches.

    An epoch begins by :meth:`begin`: scores are settled with the other ranks, the plan is made,
    shared with the jobs at the same cache, and the cache and the prefetch process are prepared for
    it. Each batch is passed to :meth:`receive` when the training loop gets it, and its losses to
    :meth:`observe`. :meth:`end` closes the books. Used by the training process only, from one
    thread; with several ranks :meth:`begin` is a collective.

    ``population`` is visited in the order of ``make_sampler``, by ``ranks``; ``policy`` is the
    cache's, and gives keys. ``scorer`` writes ``scores`` of the whole data set. Without ``records``
    nothing is counted. Raises :class:`~stoker.errors.ConfigError` as the sampler does.
    """

    def __init__(
        self,
        settings: EpochSettings,
        population: Population,
        make_sampler: SamplerFactory,
        policy: Policy,
        scores: Scores,
        scorer: Scorer,
        *,
        ranks: LazyRanks,
        backward: SelectiveBackward | None = None,
        records: Records | None = None,
        join: Callable[[int, int], Collective] | None = None,
    ) -> None:
        self.settings = settings
        self.planner = Planner(population, make_sampler, ranks, settings, policy, scores)
        """Makes the plans."""
        self.share = RankShare(self.planner, ranks, settings, policy, scores)
        """Takes this rank's share of them."""
        follows = settings.is_planned and (settings.needs_scores or self.planner.uses_scores)
        self._followers = Followers()
        self.observer = Observer(
            scores,
            scorer,
            self._followers,
            backward=backward,
            seed=settings.seed,
            needed=follows,
        )
        """Takes what training shows."""
        self.agreement = Agreement(
            self.observer,
            needed=follows or (settings.is_planned and settings.ranks_substitute),
            is_resumable=settings.is_resumable,
            without_accuracy=self.planner.without_accuracy or settings.without_accuracy,
        )
        """Brings the scores of ranks together."""
        self.records = records
        self.walk: Walk | None = None
        """Where the training loop is in the epoch in progress; None between epochs."""
        self._population, self._scores = population, scores
        self._ranks = ranks
        self._join = join
        self._opened: Opened | None = None
        self._followed: Plan | None = None  # where this job is, for those who share its cache
        self._accesses: dict[str, int] = {}  # by region, of the epoch before the one at hand
        self._resumed: int | None = None  # an epoch that had begun when its state was saved
        self._received = 0  # accesses of this rank since the epoch was begun
        self._ended = 0  # batches handed out in the iteration that ended last

    def open(self, opened: Opened) -> None:
        """Run epochs on ``opened`` from now on; to be called once, before the first of them."""
        self._opened = opened
        self._followers.open(opened.cache, opened.tracer)
        opened.cache.resume(self._accesses)

    @property
    def opened(self) -> Opened | None:
        """What :meth:`open` was given."""
        return self._opened

    # --- an epoch ---

    def begin(self, run: Mapping[str, Any], rescore: Rescore | None = None) -> Begun:
        """Begin the coming epoch, or resume it.

        ``run`` is what a trace says of this run. ``rescore`` has samples scored again that the
        scorer names; without it they keep their scores. Raises what the exchange with other ranks
        does, and :class:`~stoker.errors.ConfigError` where they made different plans.
        """
        opened, share = self._running, self.share
        at = share.begin()
        self._received = 0
        self.observer.begin_epoch()
        if opened.tracer is not None:
            opened.tracer.begin(at.epoch, at.consumed, run)
        now = self.stats()
        plan = self._prepare(at, rescore) if self.settings.is_planned else None
        if plan is None:
            if opened.member is not None:
                opened.member.begin_epoch(None, 0, 2 * self.settings.probe)
            walk, earlier = Walk(at, None, None, self._ranks.now().world_size), _NONE
        else:
            walk, earlier = share.walk(plan, at), share.earlier(at)
        if self.records is not None:
            batches = None if plan is None else share.batches(walk.start)
            self.records.begin_epoch(at.epoch, earlier, now, batches)
        self.walk = walk
        bare = 0 if opened.member is None else opened.member.probe.count
        return Begun(walk, plan, earlier, bare)

    def batch_specs(self, begun: Begun) -> Iterator[BatchSpec]:
        """Yield this rank's batches of an epoch that is planned."""
        assert begun.plan is not None, "the order is the user's"
        return self.share.batch_specs(begun.plan, begun.walk.start)

    def receive(
        self,
        batch: _Batch,
        failures: Iterable[Failure] = (),
        missed: NDArray[np.uint32] | None = None,
    ) -> _Batch:
        """Note a batch that the training loop gets; return what it gets to know of it.

        ``failures`` are samples that were replaced in it, ``missed`` (``u32[m]``) those that were
        not cached, where that matters.
        """
        opened = self._running
        stall = 0.0
        if self.records is not None:
            self.records.add_batch(batch, failures)
            stall = self.records.last_stall
        if opened.tracer is not None:
            opened.tracer.batch(batch, stall)
        if missed is not None:
            opened.cache.note_missed(missed)
        self._received += len(batch.positions)
        if opened.cache.wants_plans:
            opened.cache.pass_by(self._received)
        if opened.member is None:
            self._resume_ahead(opened)
        else:
            self._tell_jobs(opened, opened.member, batch, stall)
        return self.observer.hand_out(batch)

    def observe(self, signals: Signals, batch: ServedBatch | None = None) -> None:
        """Have a batch scored by what it showed, by default the only one that is unobserved.

        Raises :class:`~stoker.errors.ConfigError` if it is not clear which one is meant.
        """
        began = time.perf_counter()
        self.observer.add(self.observer.batch(batch), Arrived(signals), began)

    def end(self, accuracy: float = float("nan")) -> None:
        """Close the books of the epoch in progress, if there is one."""
        at = None if self.walk is None else self.walk.start.epoch
        if self.walk is not None:
            self._ended = self.walk.cursor.steps - self.walk.start.steps
        self.walk = None
        if self.records is not None:
            at = self.records.epoch if self.records.is_open else None
        if at is None:
            return
        _ = self.observer.scores  # waits for losses still being copied
        ended = Ended(at, accuracy)
        if self.records is not None:
            self.records.end_epoch(self.stats())
            if self._ranks.now().rank == 0:
                self.records.say_verdict()
            hit_ratio = self.records.epochs[-1].hit_ratio
            ended = Ended(at, accuracy, self.records.supply(), hit_ratio)
            if self._opened is not None and self._opened.member is not None:
                self._publish(self._opened.member)
        self.agreement.end(ended)
        if self._opened is not None:
            self._opened.cache.end_epoch()
            if self._opened.tracer is not None:
                self._opened.tracer.end()

    def tell(self, accuracy: float | None) -> None:
        """Note the accuracy, from 0 to 1, after the epoch that ended last, if it is known."""
        if accuracy is not None:
            self.agreement.tell(accuracy)
        if self._opened is not None and self._opened.tracer is not None:
            self._opened.tracer.end(accuracy)

    def stats(self, *, of_visits: bool = True) -> Stats:
        """Return what was counted so far; zeros without ``records``.

        Without ``of_visits`` what takes no pass over all samples.
        """
        if self.records is None:
            return Stats()
        if self._opened is None or self._opened.counters is None:
            return self.records.stats(None, 0)
        share = -(-len(self._population) // self._ranks.now().world_size) if of_visits else 0
        return self.records.stats(
            self._opened.counters(),
            share,
            non_finite=self.observer.non_finite,
            scoring_seconds=self.observer.seconds,
            **self._opened.cache.stats(),
        )

    def close(self) -> None:
        """End what the scorer runs; may be called again."""
        self.observer.close()

    # --- states ---

    def identity(self) -> str:
        """Return the identity of the plan of the epoch at hand, or of the coming one."""
        if not self.settings.is_planned:
            return OWN_ORDER
        at = self.share.coming if self.walk is None else self.walk.cursor
        return self.planner.identity(at.epoch)

    def identity_of(self, state: RankState) -> str:
        """Return the identity that the plan of a state's epoch has here."""
        planner, epoch = self.planner, state.cursor.epoch
        if not self.settings.is_planned:
            return OWN_ORDER
        if not planner.uses_scores:
            return planner.identity(epoch)
        scores = scores_of(state.agreed, len(state.scores["values"]))
        return planner.identity_from(scores, epoch, is_uniform=state.is_uniform)

    def save(
        self,
        owner: Owner,
        generator: NDArray[np.uint8] | None = None,
        batches: int | None = None,
    ) -> RankState:
        """Return the state of this rank, within an epoch or between two.

        ``generator`` is the state that the framework's own generator had when the epoch began.
        ``batches``: how many of the iteration count; None: all that were handed out.
        Waits for what other ranks of this machine have not said yet of samples that they were
        served for others, 10 seconds at most.
        """
        walk, observer, agreement = self.walk, self.observer, self.agreement
        coming = self.share.coming
        at = self._position(batches)
        has_begun, claims = walk is not None or self._resumed == coming.epoch, None
        if self._opened is not None:
            cache = self._opened.cache
            claims = cache.claims
            self._accesses = cache.accesses_before if has_begun else cache.accesses
        return RankState(
            owner=owner,
            cursor=at,
            served=self.share.served(at, walk, claims),
            has_begun=has_begun,
            scores=observer.scores.arrays(),
            observed=observer.step,
            losses=(observer.loss_sum, observer.loss_count),
            agreed=None if agreement.agreed is None else agreement.agreed.arrays(),
            ended=agreement.ended,
            is_uniform=agreement.is_uniform,
            accesses=self._accesses,
            scorer=observer.scorer.state_dict() or None,
            backward=None if observer.backward is None else observer.backward.state_dict(),
            stats=self.stats(),
            failures=() if self.records is None else tuple(self.records.failures.values()),
            generator=generator,
            by_source=None if self.records is None else self.records.by_source,
        )

    def restore(self, state: RankState) -> None:
        """Continue from a state that is this training's, perhaps another rank's of it."""
        self.end()
        self._ended = 0
        scores, losses = state.scores, state.losses
        if self.agreement.needed and state.owner.rank != self._ranks.now().rank:
            # What that rank observed since ranks agreed is its own to tell.
            losses = 0.0, 0
            scores = state.agreed or scores_of(None, len(scores["values"])).arrays()
        self.observer.restore(state.observed, losses, scores)
        parts: list[Any] = [self.observer.scorer, self.observer.backward]
        for part, saved in zip(parts, (state.scorer, state.backward), strict=True):
            if saved is not None:
                part.load_state_dict(saved)
        self.agreement.restore(state.agreed, state.ended, state.is_uniform)
        if self.planner.uses_scores:
            agreed = scores_of(state.agreed, len(scores["values"]))
            self.planner.settle(agreed, is_uniform=state.is_uniform)
        self._accesses = state.accesses
        if self._opened is not None:
            self._opened.cache.resume(state.accesses)
        self.share.resume(state.cursor, state.served)
        self._resumed = state.cursor.epoch if state.has_begun else None
        if self.records is not None:
            self.records.restore(state.stats, state.failures, self.stats(), state.by_source)

    # --- how an epoch begins ---

    @property
    def _running(self) -> Opened:
        assert self._opened is not None, "open() comes first"
        return self._opened

    def _prepare(self, at: Cursor, rescore: Rescore | None) -> Plan:
        """Return the plan of all ranks from ``at`` on, once everything is prepared for it."""
        scores = self._settle(at, rescore)
        plan = self.planner.plan(at)
        direct = self._running.direct
        is_direct = direct is not None and direct.begin(plan.ids)
        is_held = self._share(plan, at, is_direct) or is_direct
        self._place(scores, plan, at)
        if (tracer := self._running.tracer) is not None:
            volatile = np.flatnonzero(scores.volatile).astype(np.uint32)
            tracer.prepared(plan, scores.ready, volatile)
        self._foresee(at, hold=is_held)
        if self._running.cache.wants_plans:
            ids, length = self.share.known(plan)
            known_end = at.epoch + (1 if plan.following is None else 2)
            is_last = known_end == self.settings.epochs
            self._running.cache.foresee(ids, length, is_last=is_last)
        return plan

    def _settle(self, at: Cursor, rescore: Rescore | None) -> Scores:
        """Return the scores that the plan of the epoch is made from, on all ranks."""
        agreement, planner, ranks = self.agreement, self.planner, self._collective()
        if at.epoch == self._resumed:
            scores = agreement.agreed or self.observer.scores
            if planner.deviates(at):
                planner.note_served(at, put_together(planner.served(at), ranks))
        else:
            rescorer = None if rescore is None else self._rescorer(rescore, at.epoch)
            scores = agreement.reach(at.epoch, ranks, rescorer, planner.begin_epoch)
        self._resumed = None
        if planner.uses_scores:
            planner.settle(scores, is_uniform=agreement.is_uniform)
        agreement.check(planner.identity, at.epoch, ranks)
        return scores

    def _collective(self) -> Collective:
        ranks = self._ranks.now()
        if not self.agreement.needed or self._join is None or ranks.world_size == 1:
            return Alone()
        return self._join(*ranks)

    def _rescorer(self, rescore: Rescore, epoch: int) -> AgreedRescore:
        """Return what has samples scored again that are visited at all."""

        def run(ids: NDArray[np.uint32]) -> None:
            began = time.perf_counter()
            rescore(self.planner.by_node(self._population.visited(ids), epoch), epoch)
            if self.records is not None:
                self.records.add_rescoring(time.perf_counter() - began)

        return run

    def _share(self, plan: Plan, at: Cursor, is_direct: bool) -> bool:
        """Tell other jobs of the plan; return whether this epoch begins with a probe."""
        member = self._running.member
        if member is None:
            return False
        batches = 0 if at.consumed else self.share.batches(at)
        member.begin_epoch(plan, at.consumed + len(plan), batches, is_aside=is_direct)
        self._followed = plan
        return not member.probe.is_over

    def _place(self, scores: Scores, plan: Plan, at: Cursor) -> None:
        """Arrange the cache for what is left of an epoch."""
        planner, cache = self.planner, self._running.cache
        is_whole = planner.is_whole(at) or not cache.needs_whole
        whole = plan if is_whole else planner.whole(at.epoch)
        are_here, earlier = None, _NONE
        if planner.locality is not None:
            are_here = planner.locality.are_here(planner.super_epoch(at.epoch))
        if cache.claims is not None:
            earlier = np.concatenate([planner.served(at), planner.elsewhere(plan)])
        cache.begin_epoch(scores, plan, whole, self.settings.epochs, earlier, are_here)

    def _foresee(self, at: Cursor, *, hold: bool) -> None:
        """Have the epoch read ahead, and the next one where it is known already."""
        ahead, epochs = self._running.ahead, self.settings.epochs
        if ahead is None:
            return
        is_last = epochs is not None and at.epoch + 1 >= epochs
        # A probe would find what was read ahead of its epoch.
        more = not (hold or is_last or self.planner.uses_scores or self.settings.probe)
        ahead.begin(at, more, hold=hold)

    # --- while training ---

    @staticmethod
    def _resume_ahead(opened: Opened) -> None:
        """Have the epoch read ahead that was held back, once nothing is against it."""
        is_probing = opened.member is not None and not opened.member.probe.is_over
        is_direct = opened.direct is not None and opened.direct.is_on
        if opened.ahead is not None and not (is_probing or is_direct):
            opened.ahead.go_on()

    def _tell_jobs(
        self, opened: Opened, member: Member, batch: ServedBatch, stall_seconds: float
    ) -> None:
        """Tell other jobs how far this one is, and heed what they tell."""
        plan, start = self._followed, 0 if self.walk is None else self.walk.start.consumed
        positions = batch.positions - start if plan is not None else _NO_POSITIONS
        is_direct = opened.direct is not None and opened.direct.is_on
        if member.received(positions, stall_seconds, is_aside=is_direct):
            opened.cache.write_keys(self._scores)
        if member.is_due:
            self._publish(member)
        if is_direct:
            return
        self._resume_ahead(opened)
        if opened.ahead is not None and plan is not None and member.was_shared:
            opened.ahead.follow(plan, (int(positions[-1]) + 1) // self._ranks.now().world_size)

    def _publish(self, member: Member) -> None:
        """Show other processes what was counted."""
        if self.records is not None:
            member.publish(vars(self.stats(of_visits=False)), self.records.waits.counts)

    def _position(self, batches: int | None) -> Cursor:
        """Return where training is after so many batches of the iteration; None: after all.

        Raises :class:`~stoker.errors.ConfigError` where that is not known.
        """
        if self.walk is not None:
            return self.walk.after(batches)
        if batches is not None and batches != self._ended:
            raise ConfigError(
                f"batches={batches}, and the iteration has ended after {self._ended}: draw "
                "batches no further than len() before the last one counts"
            )
        return self.share.coming

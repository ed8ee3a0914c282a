"""One key per sample for several jobs: what each would keep, weighted by its gain."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.jobs.board import Board, Kind
from stoker.plan import Plan
from stoker.policy.base import Policy, Region
from stoker.policy.next_use import NextUse
from stoker.scores import Scores

Floats = NDArray[np.float64]
Ids = NDArray[np.uint32]
Keys = NDArray[np.float64]


def counted(gains: Floats, thresholds: Floats) -> NDArray[np.bool_]:
    """Return bool[J]: the jobs whose scores count.

    Those that gain from the cache at least what their own ``thresholds`` f64[J] say (iCache: 1.5,
    HPCA 2023, multi-job). Where none does, all of them count, since something must decide.
    """
    eligible = gains >= thresholds
    return eligible if eligible.any() else np.ones(len(gains), np.bool_)


def joint_value(values: Floats, gains: Floats, thresholds: Floats) -> Floats:
    """Return f64[n]: iCache's aggregated importance AIV_i = sum over jobs of gain_j x RIV_ij.

    Over the sum of these gains, so that a key written now compares with those written when gains
    were others, or other jobs counted; that changes no order among keys written at once.
    ``values`` f64[J, n] are relative importance values RIV, the percentile of a sample's importance
    within a job, in (0, 1]; 0 where the job has not seen it. A sample that no counted job has seen
    gets -inf, as with one job: its worth is unknown. Source: Chen et al., HPCA 2023.
    """
    counts = counted(gains, thresholds)
    total = gains[counts] @ values[counts] / gains[counts].sum()
    return np.where(values[counts].max(axis=0, initial=0.0) > 0, total, -np.inf)


def soonest(
    positions: NDArray[np.int64],
    now: NDArray[np.int64],
    rates: Floats,
    periods: Floats,
    later: Floats | float = 0.0,
) -> Floats:
    """Return f64[n]: seconds until one of J jobs uses each sample, the least of them.

    ``positions`` i64[J, n]: the access by which a job uses the sample next, in its own count, of
    which it has reached ``now`` i64[J]; ``rates`` f64[J]: its accesses per second; ``periods``
    f64[J]: its accesses in an epoch. ``later`` (seconds, f64[n] or one): uses before that do not
    count. Of a job whose known use is before that, the next one is expected an epoch after it.
    """
    rates = known_rates(rates)[:, None]
    seconds = (positions - now[:, None]) / rates
    epochs = np.maximum(periods, 1.0)[:, None] / rates
    missed = np.ceil(np.maximum(0.0, later - seconds) / epochs)
    result: Floats = (seconds + missed * epochs).min(axis=0)
    return result


def known_rates(rates: Floats) -> Floats:
    """Return f64[J] accesses per second, with the mean of the others for jobs not measured yet."""
    measured = rates > 0
    if measured.all():
        return rates
    return np.where(measured, rates, rates[measured].mean() if measured.any() else 1.0)


class Ranking:
    """Where a score stands among those of all samples of a job, as of the latest :meth:`learn`.

    iCache's relative importance value RIV: scores of different models differ in scale, their ranks
    do not. Not thread-safe.
    """

    def __init__(self) -> None:
        self._sorted: Floats = np.empty(0)
        self._seen = 0  # scores asked about since then

    def is_stale(self, scores: Floats, num_samples: int) -> bool:
        """Note a batch of scores f64[n]; return whether it is time to read all of them again.

        That is when all are given, when none is known, and when as many were given as are known.
        """
        self._seen += int(np.isfinite(scores).sum())
        return len(scores) == num_samples or self._seen > len(self._sorted)

    def learn(self, scores: Floats) -> None:
        """Take the scores f64[N] of all samples; -inf for those without a known score."""
        self._sorted = np.sort(scores[np.isfinite(scores)])
        self._seen = 0

    def percentiles(self, scores: Floats) -> NDArray[np.float32]:
        """Return f32[n] in (0, 1]: the share of known scores that are at most these; 0 for -inf."""
        known = np.isfinite(scores)
        ranks = np.searchsorted(self._sorted, scores, side="right")
        share = np.clip(ranks, 1, None) / max(1, len(self._sorted))
        return np.where(known, np.minimum(share, 1.0), 0.0).astype(np.float32)


def kind_of(policy: Policy) -> Kind:
    """Return what the keys of ``policy`` mean."""
    if policy.natural_keys:
        return Kind.NONE
    if policy.looks_ahead:
        return Kind.TIME
    return Kind.SCORE if policy.follows_scores else Kind.NONE


class Merged(Policy):
    """``policy``, but for its keys where other jobs use the cache too.

    Until :meth:`share`, and while its job is the only one, its keys are those of ``policy``. With
    others they are of the first job's kind:

    - when a sample is needed: minus the time, in seconds, at which a job will use it first, which
      :class:`~stoker.policy.next_use.NextUse` weighs by ``sizes`` i64[N], using the first job's
      request cost;
    - what it is worth: :func:`~stoker.jobs.merged.joint_value` of all jobs. A job without scores
      adds nothing, and takes the keys of the others.

    Where the cache orders samples itself there is nothing to merge. The rest of a policy
    (regions, places) is that of ``policy``. It uses clock and locks only through the board that it
    is given, so that a simulator can replay it. Used by one thread.
    """

    def __init__(self, policy: Policy, sizes: NDArray[np.int64] | None = None) -> None:
        self.policy = policy
        self._sizes = sizes
        self._board: Board | None = None
        self._token = 0
        self._slot = 0
        self._ranking = Ranking()

    def share(self, board: Board, slot: int) -> None:
        """Merge keys with the other jobs of ``board``; ``slot`` is this process's row."""
        self._board, self._slot = board, slot
        self._token = int(board.jobs["token"][slot])
        board.jobs["request_bytes"][slot] = self.policy.shared_request_bytes

    # --- the policy ---

    @property
    def name(self) -> str:
        """That of the policy."""
        return self.policy.name

    @property
    def natural_keys(self) -> bool:
        """Whether the cache orders samples itself."""
        return self.policy.natural_keys and self._kind is Kind.NONE

    @property
    def looks_ahead(self) -> bool:
        """Whether keys need a plan."""
        return self.policy.looks_ahead or self._kind is Kind.TIME

    @property
    def follows_scores(self) -> bool:
        """Whether keys change when scores do."""
        return self.policy.follows_scores and self._kind is not Kind.TIME

    @property
    def overflow(self) -> str:
        """That of the policy."""
        return self.policy.overflow

    @property
    def shared_request_bytes(self) -> float:
        """That of the policy."""
        return self.policy.shared_request_bytes

    @property
    def has_places(self) -> bool:
        """Whether the policy has places."""
        return self.policy.has_places

    def for_batches(self, share: float) -> Merged:
        """Tell the policy of batches on their way; return this one, which has it."""
        self.policy = self.policy.for_batches(share)
        return self

    def regions(self) -> tuple[Region, ...]:
        """Those of the policy."""
        return self.policy.regions()

    def places(self, scores: Scores, plan: Plan, num_samples: int) -> NDArray[np.uint8]:
        """Return u8[N], those of the policy."""
        return self.policy.places(scores, plan, num_samples)

    def keys(
        self,
        ids: Ids,
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> Keys | None:
        """Return f64[n], one key per id of ``ids`` u32[n], or None; see Policy."""
        own = self.policy.keys(ids, scores, plan, position)
        board = self._board
        if board is None:
            return own
        if board.kind is Kind.SCORE:
            return self._keys_by_value(board, ids, own, scores, plan)
        if board.kind is Kind.TIME and plan is not None:
            return self._keys_by_time(board, ids, own, plan, position)
        return own

    # --- all at once ---

    def begin_plan(self, plan: Plan, length: int) -> None:
        """Publish when this job uses each sample next: from ``plan`` on, whose epoch is that long.

        Not needed where keys are no times; of several ranks one is enough.
        """
        board = self._board
        if board is None or board.kind is not Kind.TIME:
            return
        upcoming = plan.start + plan.first_use(board.num_samples)
        row = self._row(board)
        board.next_use[row] = upcoming.astype(np.uint32)
        board.jobs["position"][row] = plan.start
        board.jobs["period"][row] = length

    def withdraw(self) -> None:
        """Publish that this job uses nothing of the cache, until the next :meth:`begin_plan`."""
        if self._board is not None:
            self._board.jobs["period"][self._row(self._board)] = 0

    def pass_by(self, plan: Plan, positions: NDArray[np.int64]) -> None:
        """Publish that the accesses ``positions`` i64[n] of ``plan`` are done."""
        board = self._board
        if board is not None and board.kind is Kind.TIME and len(positions):
            later = plan.start + plan.next_use[positions]
            board.next_use[self._row(board), plan.ids[positions]] = later.astype(np.uint32)

    def keys_now(self, ids: Ids, scores: Scores | None, plan: Plan | None) -> Keys | None:
        """Return f64[n]: the keys of ``ids`` by what all jobs have published, in mid-epoch."""
        board = self._board
        if board is None or board.kind is not Kind.TIME:
            return self.keys(ids, scores, plan, None)
        others = self._others(board)
        own = np.array([self._row(board)])
        if not len(others) and plan is not None:
            return self._own_times(ids, plan, board.positions(own, ids)[0] - plan.start)
        slots = np.concatenate([own, others])
        return self._times(board, ids, slots, board.positions(slots, ids), 0.0)

    # --- by time ---

    def _keys_by_time(
        self,
        board: Board,
        ids: Ids,
        own: Keys | None,
        plan: Plan,
        position: NDArray[np.int64] | None,
    ) -> Keys:
        others = self._others(board)
        if not len(others) and own is not None and isinstance(self.policy, NextUse):
            return own
        if position is None:
            upcoming = plan.first_use(board.num_samples)[ids]
        else:
            upcoming = plan.next_use[position]
        if not len(others):
            return self._own_times(ids, plan, upcoming)
        slots = np.concatenate([[self._row(board)], others])
        positions = np.concatenate([(plan.start + upcoming)[None], board.positions(others, ids)])
        later: Keys | float = 0.0
        if position is not None:  # what others do before this access is useless after it
            now = int(board.jobs["position"][slots[0]])
            later = (plan.start + position - now) / known_rates(board.rates(slots))[0]
        return self._times(board, ids, slots, positions, later)

    def _times(
        self,
        board: Board,
        ids: Ids,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        later: Keys | float,
    ) -> Keys:
        jobs = board.jobs
        seconds = soonest(
            positions, jobs["position"][slots], board.rates(slots), jobs["period"][slots], later
        )
        first = board.jobs["request_bytes"][board.owners()[:1]]  # none, once all have left
        weighted = NextUse(float(first.sum()), self._sizes)
        return weighted.keys_after(ids, board.clock() - float(board.head["base"][0]) + seconds)

    def _own_times(self, ids: Ids, plan: Plan, upcoming: NDArray[np.int64]) -> Keys:
        """Return the policy's keys of samples used at the positions ``upcoming`` of ``plan``."""
        if isinstance(self.policy, NextUse):
            return self.policy.keys_at(ids, plan, upcoming)
        return -(plan.start + upcoming).astype(np.float64)

    # --- by value ---

    def _keys_by_value(
        self, board: Board, ids: Ids, own: Keys | None, scores: Scores | None, plan: Plan | None
    ) -> Keys | None:
        others = self._others(board)
        if own is None or kind_of(self.policy) is not Kind.SCORE:
            slots = others
        else:
            row = self._row(board)
            if self._ranking.is_stale(own, board.num_samples):
                every = np.arange(board.num_samples, dtype=np.uint32)
                keys = self.policy.keys(every, scores, plan, None)
                self._ranking.learn(own if keys is None else keys)
            board.value[row, ids] = self._ranking.percentiles(own)
            if not len(others):
                return own
            slots = np.concatenate([[row], others])
        if not len(slots):
            return own
        jobs = board.jobs[slots]
        slots, jobs = slots[jobs["token"] > 0], jobs[jobs["token"] > 0]
        if not len(slots):  # they left just now
            return own
        values = board.values(slots, ids).astype(np.float64)
        return joint_value(values, jobs["gain"], jobs["threshold"])

    # --- who ---

    @property
    def _kind(self) -> Kind:
        return Kind.NONE if self._board is None else self._board.kind

    def _row(self, board: Board) -> int:
        """Return the row of this job, which is that of its first rank on this node."""
        owners = board.owners()
        mine = owners[board.jobs["token"][owners] == self._token]
        return int(mine[0]) if len(mine) else self._slot

    def _others(self, board: Board) -> NDArray[np.int64]:
        """Return the rows i64[J] of other jobs, as far as they have published it."""
        owners = board.owners()
        told = board.jobs["token"][owners] != self._token
        if board.kind is Kind.TIME:
            told &= board.jobs["period"][owners] > 0
        return np.asarray(owners[told])

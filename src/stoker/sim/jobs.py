"""Several trainings over one cache, replayed side by side."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError
from stoker.jobs.board import Board
from stoker.jobs.merged import Merged, kind_of
from stoker.policy.base import Policy
from stoker.recipes import Recipe, as_recipe
from stoker.shared import private_arrays
from stoker.sim.job import Job, Step
from stoker.sim.replay import (
    as_cached,
    as_losses,
    as_share,
    as_sizes,
    default_batch,
    held_share,
)
from stoker.sim.replayed_cache import ReplayedCache
from stoker.sim.result import EpochResult, SimResult
from stoker.sim.signals import Losses
from stoker.types import Outcome

MOST_JOBS = 8
"""Jobs that can be replayed side by side."""


@dataclass(frozen=True)
class JobsResult:
    """What a replay of several jobs counted."""

    jobs: tuple[SimResult, ...]
    """Each of them."""
    joined: tuple[int, ...]
    """By epoch, hits for which a job waits while another one reads the sample."""

    @property
    def together(self) -> SimResult:
        """All jobs as one: counts are sums, ``ess`` and ``coverage`` means; it has no times."""
        epochs = zip(*(job.per_epoch for job in self.jobs), strict=True)
        first = self.jobs[0]
        joint = tuple(map(_summed, epochs))
        return SimResult(first.recipe, first.num_samples, first.cache_share, joint)

    @property
    def reads(self) -> int:
        """Reads of the source: a sample that several jobs miss at once is read by one of them."""
        return sum(epoch.fetched for job in self.jobs for epoch in job.per_epoch)

    def after(self, epochs: int) -> JobsResult:
        """Return the same without the first ``epochs`` of each job."""
        return JobsResult(tuple(job.after(epochs) for job in self.jobs), self.joined[epochs:])


def replay_jobs(
    recipes: Sequence[str | Recipe],
    num_samples: int,
    epochs: int,
    cache: int | float | str,
    *,
    sizes: ArrayLike | None = None,
    losses: ArrayLike | Losses | None = None,
    seeds: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    merge: bool = True,
    flight_seconds: float = 0.02,
    batch_size: int | None = None,
    cached: float | ArrayLike | None = None,
    progress: Callable[[], None] | None = None,
) -> JobsResult:
    """Return what 1 to 8 jobs would hit that train at once on one data set and share its cache.

    ``recipes``: one for each job; ``seeds``: by default 0, 1, 2, ...; ``rates``: samples a second
    of each, by default 1000 for all; batches of all jobs take place in the order of their times.
    ``merge``: keys are those of all jobs, as :mod:`stoker.jobs` merges them; else each job writes
    its own. The first job divides the cache. ``flight_seconds``: how long a read takes, in which
    another job that needs the sample waits for it. Other arguments are those of
    :func:`~stoker.sim.replay.replay`; ``progress`` is called after each epoch of each job.

    Raises :class:`~stoker.errors.ConfigError` for arguments out of range, and for recipes that
    have samples packaged.
    """
    count = len(recipes)
    if not 1 <= count <= MOST_JOBS:
        raise ConfigError(f"{count} jobs cannot be replayed: give 1 to {MOST_JOBS} recipes")
    speeds = np.full(count, 1000.0) if rates is None else np.asarray(rates, np.float64)
    drawn = list(range(count)) if seeds is None else list(seeds)
    if speeds.shape != (count,) or not (speeds > 0).all() or len(drawn) != count:
        raise ConfigError(f"rates={rates}, seeds={seeds}: give one for each of {count} jobs")
    batch_size = default_batch(num_samples) if batch_size is None else batch_size
    if epochs < 1 or batch_size < 1 or not flight_seconds >= 0:
        raise ConfigError(
            f"epochs={epochs}, batch_size={batch_size}, flight_seconds={flight_seconds} are "
            "refused: give 1 or more, and 0 seconds or more"
        )
    chosen = [as_recipe(recipe) for recipe in recipes]
    if any(recipe.packaging is not None for recipe in chosen) and count > 1:
        raise ConfigError("packages of several jobs are not simulated: give recipes without")
    lengths = as_sizes(sizes, num_samples)
    share = as_share(cache, lengths)
    kept = as_cached(cached, lengths)
    held = held_share(share, lengths, kept)
    shared = _Shared(kept, merge and count > 1)
    trainings: list[_Training] = []
    with ExitStack() as stack:
        stack.enter_context(private_arrays())
        first: ReplayedCache | None = None
        for recipe, seed, rate in zip(chosen, drawn, speeds.tolist(), strict=True):
            mine = ReplayedCache(
                recipe, kept, held, seed, batch_size=batch_size, beside=first, wrap=shared.wrap
            )
            stack.enter_context(mine)
            first = first or mine
            told = as_losses(losses, num_samples, seed)
            job = Job(recipe, mine, told, epochs, batch_size, seed)
            trainings.append(_Training(job, epochs, rate, shared.enter(mine.policy, rate)))
        flights = _Flights(num_samples, epochs, flight_seconds)
        _interleave(trainings, shared, flights, progress or (lambda: None))
    jobs = tuple(
        SimResult(recipe.name, num_samples, share, tuple(training.done))
        for recipe, training in zip(chosen, trainings, strict=True)
    )
    return JobsResult(jobs, tuple(flights.joined.tolist()))


def _interleave(
    trainings: list[_Training], shared: _Shared, flights: _Flights, progress: Callable[[], None]
) -> None:
    """Advance the job whose batch is over first, until all are through."""
    due = [(0.0, number) for number in range(len(trainings))]
    while due:
        shared.now, number = due[0]
        training = trainings[number]
        before = len(training.done)
        step = training.step()
        if len(training.done) > before:
            progress()
        if step is None:
            heapq.heappop(due)
            shared.leave(training.slot)
            continue
        flights.add(number, step, shared.now)
        shared.note(training.slot, training.job.cache.policy, step)
        heapq.heapreplace(due, (shared.now + len(step.positions) / training.rate, number))


class _Training:
    """One job: its batches, over all epochs."""

    def __init__(self, job: Job, epochs: int, rate: float, slot: int) -> None:
        self.job, self.rate, self.slot = job, rate, slot
        self.done: list[EpochResult] = []
        self._epochs = epochs
        self._steps: Generator[Step, None, EpochResult] | None = None

    def step(self) -> Step | None:
        """Serve the next batch; None when all epochs are over."""
        while len(self.done) < self._epochs:
            if self._steps is None:
                self._steps = self.job.steps()
            try:
                return next(self._steps)
            except StopIteration as end:
                self.done.append(end.value)
                self._steps = None
        return None


class _Shared:
    """What the jobs know of each other: production's board, on virtual time."""

    def __init__(self, sizes: NDArray[np.int64], merge: bool) -> None:
        self.now = 0.0
        self._sizes = sizes
        self._board = Board.of_its_own(len(sizes), lambda: self.now) if merge else None
        self._slots = 0

    def wrap(self, policy: Policy) -> Policy:
        """Return the policy with the keys of all jobs, if keys are merged."""
        return policy if self._board is None else Merged(policy, self._sizes)

    def enter(self, policy: Policy, rate: float) -> int:
        """Make a job known that trains at this rate; return its row."""
        slot, board = self._slots, self._board
        self._slots += 1
        if board is not None and isinstance(policy, Merged):
            board.enter(slot, slot + 1, kind_of(policy.policy), f"job {slot}", 0, 1.0)
            board.jobs["rate"][slot], board.jobs["noted"][slot] = rate, self.now
            policy.share(board, slot)
        return slot

    def note(self, slot: int, policy: Policy, step: Step) -> None:
        """Publish that a batch is over."""
        if self._board is None or not isinstance(policy, Merged):
            return
        rows = self._board.jobs
        rows["position"][slot] = step.plan.start + int(step.positions[-1]) + 1
        rows["noted"][slot] = self.now
        policy.pass_by(step.plan, step.positions)

    def leave(self, slot: int) -> None:
        """Note that a job is through."""
        if self._board is not None:
            self._board.leave(slot)


class _Flights:
    """Which hits are for samples that another job is still reading."""

    def __init__(self, num_samples: int, epochs: int, seconds: float) -> None:
        self.joined = np.zeros(epochs, np.int64)
        """``i64[epochs]``, such hits."""
        self._seconds = seconds
        self._reader = np.full(num_samples, -1, np.int8)
        self._since = np.full(num_samples, -np.inf)

    def add(self, number: int, step: Step, now: float) -> None:
        """Take a batch of one job into account."""
        ids, outcomes = step.served.ids, step.served.outcomes
        hits = ids[outcomes == Outcome.HIT]
        others: NDArray[np.bool_] = (self._reader[hits] != number) & (self._reader[hits] >= 0)
        joined = others & (now - self._since[hits] < self._seconds)
        self.joined[step.plan.epoch] += int(joined.sum())
        fetched = ids[outcomes == Outcome.FETCHED]
        self._reader[fetched], self._since[fetched] = number, now


def _summed(epochs: tuple[EpochResult, ...]) -> EpochResult:
    counts = ("accesses", "hits", "substituted", "fetched", "packaged")
    more = ("hit_bytes", "served_bytes", "package_reads")
    return EpochResult(
        epochs[0].epoch,
        **{name: sum(getattr(epoch, name) for epoch in epochs) for name in counts + more},
        ess=float(np.mean([epoch.ess for epoch in epochs])),
        coverage=float(np.mean([epoch.coverage for epoch in epochs])),
    )

"""Recorded trainings, played back: their visits, losses and scores, under other caches."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.plan import Plan
from stoker.recipes import Recipe
from stoker.sampler.base import Sampler
from stoker.scores import Scores
from stoker.sim.trace import EpochTrace, Trace, Update


def as_trace(trace: object, num_samples: int) -> Trace | None:
    """Return the recorded training that ``trace`` names; None if it is something else.

    Raises :class:`~stoker.errors.ConfigError` for one of another number of samples.
    """
    if not isinstance(trace, (str, os.PathLike, Trace)):
        return None
    opened = trace if isinstance(trace, Trace) else Trace(trace)
    if opened.num_samples != num_samples:
        raise ConfigError(
            f"the trace {opened.path} is of {opened.num_samples} samples, and {num_samples} are "
            "asked for: give its number"
        )
    return opened


class Visits:
    """The accesses of a trace as plans, its first epoch being number 0."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._numbers = trace.epochs
        self._read: deque[tuple[int, NDArray[np.uint32]]] = deque(maxlen=2)
        self._starts = [0]

    def __len__(self) -> int:
        return len(self._numbers)

    def ids(self, epoch: int) -> NDArray[np.uint32]:
        """Return ``u32[A]``, what was asked for; ConfigError for an epoch that is not there."""
        for number, ids in self._read:
            if number == epoch:
                return ids
        if not 0 <= epoch < len(self):
            raise ConfigError(f"the trace {self._trace.path} has {len(self)} epochs, not {epoch}")
        self._read.append((epoch, self._trace.epoch(self._numbers[epoch]).asked))
        return self._read[-1][1]

    def plan(self, epoch: int) -> Plan:
        """Return the accesses of ``epoch``; those of the next one follow if there is one."""
        following = None
        if epoch + 1 < len(self):
            following = Plan(epoch + 1, self._start(epoch + 1), self.ids(epoch + 1))
        ids = self.ids(epoch)
        return Plan(epoch, self._start(epoch), ids, None, following, repeats=comes_again(ids))

    def _start(self, epoch: int) -> int:
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + len(self.ids(len(self._starts) - 1)))
        return self._starts[epoch]


def comes_again(ids: NDArray[np.uint32]) -> bool:
    """Whether an epoch's accesses ``u32[A]`` repeat samples: more than fill it up for ranks."""
    return len(np.unique(ids)) < 0.95 * len(ids)


class PlayedSampler(Sampler):
    """A sampler whose plans are what was visited; see :class:`~stoker.sampler.base.Sampler`."""

    uses_scores: ClassVar[bool] = True

    def __init__(self, trace: Trace) -> None:
        self._visits = Visits(trace)

    @cached_property
    def longest(self) -> int:
        """Accesses of the longest epoch; the whole trace is read for it."""
        return max(len(self._visits.ids(epoch)) for epoch in range(len(self._visits)))

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return how many accesses ``epoch`` had."""
        return len(self._visits.ids(epoch))

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return what was visited in ``epoch``, whatever the scores."""
        ids = self._visits.ids(epoch)
        return Plan(epoch, epoch * self.longest, ids, repeats=comes_again(ids))


class Player(Scorer):
    """A scorer that gives out the scores of a trace, whatever it is shown.

    Where training had scored so many visits, it gives the scores of as many. Samples that had been
    rescored before an epoch get their scores as it begins.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({"losses"})

    neighbours: Neighbours | None = None
    """Those of the batch scored last."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._numbers = trace.epochs
        self._epoch = -1
        self._coming: deque[Update] = deque()
        self._visited = self._scored = 0
        self._step = 0

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Give out what is left of the epoch before, and what the recorded scorer said now."""
        if epoch == self._epoch or not 0 <= epoch < len(self._numbers):
            return
        self._give(scores, len(self._coming))
        found = self._trace.epoch(self._numbers[epoch])
        scores.ready = found.ready
        scores.set_volatile(found.volatile)
        self._epoch, self._visited, self._scored = epoch, 0, 0
        self._coming = deque(sorted(found.updates, key=lambda update: not update.is_aside))
        self._give(scores, sum(update.is_aside for update in found.updates))

    def update(self, scores: Scores, observation: Observation) -> None:
        """Give out what had been scored after so many visits."""
        self.begin_epoch(scores, observation.epoch)
        self._visited += len(observation.ids)
        self._step, self.neighbours = observation.step, None
        while self._coming and self._scored + len(self._coming[0].ids) <= self._visited:
            self._scored += len(self._coming[0].ids)
            self._give(scores, 1)

    def _give(self, scores: Scores, count: int) -> None:
        for _ in range(count):
            update = self._coming.popleft()
            scores.update(update.ids, update.values, self._step)
            self.neighbours = update.neighbours


class RecordedLosses:
    """The loss of each sample in each epoch of a trace; see :class:`~stoker.sim.signals.Losses`.

    That of its latest visit up to then, and the mean of all where it had none. Raises
    :class:`~stoker.errors.ConfigError` when it is asked and the trace has no losses.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._numbers = trace.epochs
        self._rewind()

    def __call__(self, ids: NDArray[np.uint32], epoch: int) -> NDArray[np.float64]:
        """Return the losses of ``ids`` in ``epoch``; those of the last one are repeated."""
        if epoch < self._at:
            self._rewind()
        while self._at < min(epoch, len(self._numbers) - 1):
            self._at += 1
            self._take(self._trace.epoch(self._numbers[self._at]))
        if not self._count:
            raise ConfigError(
                f"the trace {self._trace.path} has no losses: call loader.observe() in training, "
                "or give losses="
            )
        losses: NDArray[np.float64] = self._losses[ids]
        return np.where(np.isnan(losses), self._sum / self._count, losses)

    def _rewind(self) -> None:
        self._at, self._sum, self._count = -1, 0.0, 0
        self._losses = np.full(self._trace.num_samples, np.nan)

    def _take(self, found: EpochTrace) -> None:
        for ids, losses, _ in found.shown:
            self._losses[ids] = losses
            self._sum += float(losses.sum())
            self._count += len(losses)


def played(recipe: Recipe, trace: Trace) -> Recipe:
    """Return ``recipe`` over a recorded training: its cache, and what was visited and scored then.

    Its sampler and scorer are a :class:`PlayedSampler` and a :class:`Player`; all samples of a
    batch are learned from.
    """
    return replace(scored_by(recipe, trace), sampler=_Same(PlayedSampler, trace), backward=None)


def scored_by(recipe: Recipe, trace: Trace) -> Recipe:
    """Return ``recipe`` with the scores of a trace, and its own sampler."""
    return replace(recipe, scorer=_Same(Player, trace))


class _Same:
    """Makes a part from a trace, for whatever number of samples and job."""

    def __init__(self, make: Callable[[Trace], Any], trace: Trace) -> None:
        self._make, self._trace = make, trace

    def __call__(self, num_samples: int, **job: Any) -> Any:
        return self._make(self._trace)

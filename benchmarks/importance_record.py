"""What one training did, so that caches can be tried on it without training again.

Written down by a scorer that stands in front of the recipe's own: which samples each epoch visited,
what score each got at each step, and what the recipe's own scorer said between epochs. Played back
through the same Loader, so that placement, splits, substitution and packaging are the production
code; only the model is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.importance.hybrid import Hybrid
from stoker.plan import Plan
from stoker.recipes import Recipe
from stoker.sampler import UniformSampler
from stoker.scores import Scores

Ids = NDArray[np.uint32]


@dataclass
class Update:
    """The scores that one batch got."""

    epoch: int
    is_aside: bool
    """Whether the batch was not training's, but rescored before the epoch."""
    ids: Ids
    values: NDArray[np.float64]
    neighbours: Neighbours | None = None


@dataclass
class Record:
    """One training: per epoch what was visited, and all updates of the scores in order."""

    visited: list[Ids] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    ready: list[bool] = field(default_factory=list)
    volatile: list[Ids] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)

    def scores_before(self, num_samples: int) -> Iterator[tuple[NDArray[np.float64], Ids]]:
        """Yield for each epoch the scores f64[N] as it began, -inf if unseen, and its visits."""
        scores = np.full(num_samples, -np.inf)
        for epoch, visited in enumerate(self.visited):
            of_epoch = [u for u in self.updates if u.epoch == epoch]
            for update in (u for u in of_epoch if u.is_aside):
                scores[update.ids] = update.values
            yield scores, visited
            for update in (u for u in of_epoch if not u.is_aside):
                scores[update.ids] = update.values

    def highest_first(self, num_samples: int) -> Record:
        """Return the record with each epoch in descending order of the scores it began with."""
        order = [
            visited[np.argsort(-scores[visited], kind="stable")]
            for scores, visited in self.scores_before(num_samples)
        ]
        return replace(self, visited=order)

    def save(self, path: Path) -> None:
        """Write the record as one compressed file."""
        near = [u.neighbours for u in self.updates if u.neighbours is not None]
        np.savez_compressed(
            path,
            visited=_joined(self.visited),
            visited_sizes=_sizes(self.visited),
            accuracies=np.array(self.accuracies),
            ready=np.array(self.ready),
            volatile=_joined(self.volatile),
            volatile_sizes=_sizes(self.volatile),
            ids=_joined([u.ids for u in self.updates]),
            sizes=_sizes([u.ids for u in self.updates]),
            values=np.concatenate([u.values for u in self.updates]),
            epochs=np.array([u.epoch for u in self.updates]),
            aside=np.array([u.is_aside for u in self.updates]),
            near_ids=_joined([n.ids for n in near]),
            near_sizes=_sizes([n.ids for n in near]),
            near_degree=_joined([n.degree for n in near]),
            near_neighbours=_joined([n.all for n in near]),
        )

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what :meth:`save` wrote."""
        with np.load(path) as stored:
            part = dict(stored)
        record = cls(
            visited=_split(part["visited"], part["visited_sizes"]),
            accuracies=part["accuracies"].tolist(),
            ready=part["ready"].tolist(),
            volatile=_split(part["volatile"], part["volatile_sizes"]),
        )
        near: list[Neighbours | None] = [None] * len(part["sizes"])
        if len(part["near_sizes"]):
            near = list(_neighbours(part))
        rows = zip(
            part["epochs"].tolist(),
            part["aside"].tolist(),
            _split(part["ids"], part["sizes"]),
            _split(part["values"], part["sizes"]),
            near,
            strict=True,
        )
        record.updates = [Update(*row) for row in rows]
        return record


def _neighbours(part: dict[str, NDArray[Any]]) -> Iterator[Neighbours]:
    ids = _split(part["near_ids"], part["near_sizes"])
    degrees = _split(part["near_degree"], part["near_sizes"])
    lists = _split(part["near_neighbours"], np.array([d.sum() for d in degrees]))
    for step, (own, degree, others) in enumerate(zip(ids, degrees, lists, strict=True)):
        yield Neighbours.listed(step, own, degree, others)


def _joined(parts: list[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def _sizes(parts: list[Any]) -> NDArray[np.int64]:
    return np.array([len(part) for part in parts], np.int64)


def _split(joined: NDArray[Any], sizes: NDArray[np.int64]) -> list[NDArray[Any]]:
    return np.split(joined, np.cumsum(sizes)[:-1]) if len(sizes) else []


class Recorder:
    """Does as another scorer, and writes down what it did."""

    def __init__(self, scorer: Scorer, record: Record) -> None:
        self._scorer, self._record = scorer, record
        self.is_training = False
        """Whether what is observed comes from training, not from rescoring."""

    @property
    def needs(self) -> frozenset[Signal]:
        """What the other scorer needs."""
        return self._scorer.needs

    def update(self, scores: Scores, observation: Observation) -> None:
        """Let the other scorer finish, then write down the scores."""
        self._scorer.update(scores, observation)
        self._scorer.drain()
        ids = observation.ids.copy()
        near = self._scorer.neighbours
        self._record.updates.append(
            Update(observation.epoch, not self.is_training, ids, scores.values[ids].copy(), near)
        )

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Let the other scorer begin, and write down what it asks for."""
        self._scorer.begin_epoch(scores, epoch)
        self._record.ready.append(scores.ready)
        self._record.volatile.append(np.flatnonzero(scores.volatile).astype(np.uint32))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._scorer, name)


class Player:
    """A scorer that gives out the scores of a record, whatever it is shown.

    Which samples are volatile is determined again from those scores, since their number depends on
    the cache; rescored, as far as the record has it, are those of the training.
    """

    needs: frozenset[Signal] = frozenset({"losses"})

    def __init__(self, record: Record, num_samples: int) -> None:
        self._record = record
        self._coming = iter(record.updates)
        self._hybrid: Hybrid | None = None
        if any(len(ids) for ids in record.volatile):
            # An overlap above 1 never is: the warm-up is as long as it was.
            warm_up = record.ready.index(True)
            self._hybrid = Hybrid(num_samples, overlap=1.0, max_warm_up=warm_up)
        self.neighbours: Neighbours | None = None
        self.volatile: Ids = np.empty(0, np.uint32)

    def cache_holds(self, samples: int) -> None:
        """Tell how many samples the cache holds."""
        if self._hybrid is not None:
            self._hybrid.cache_holds(samples)

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the recorded scores of this step."""
        update = next(self._coming)
        scores.update(update.ids, update.values, observation.step)
        self.neighbours = update.neighbours

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Say what the recorded scorer said, and ask for what was rescored then."""
        if self._hybrid is not None:
            self._hybrid.begin_epoch(scores, epoch)
        if self._record.ready:  # nothing is said where scores are not used
            scores.ready = self._record.ready[epoch]
        aside = [u.ids for u in self._record.updates if u.epoch == epoch and u.is_aside]
        self.volatile = np.concatenate([self.volatile[:0], *aside])


class PlayedSampler:
    """A sampler whose plans are what was visited."""

    uses_scores = True

    def __init__(self, record: Record) -> None:
        self._visited = record.visited
        self.longest = max(len(ids) for ids in record.visited)

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return how many samples were visited in ``epoch``."""
        return len(self._visited[epoch])

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return what was visited in ``epoch``."""
        return Plan(epoch, epoch * self.longest, self._visited[epoch])


class RandomPruning:
    """A sampler that visits so many random samples in each epoch, each at most once."""

    uses_scores = False

    def __init__(self, sizes: list[int], num_samples: int, **job: Any) -> None:
        job.pop("epochs")
        self._sizes, self._all = sizes, UniformSampler(num_samples, **job)
        self.longest = self._all.longest

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return how many are visited in ``epoch``."""
        return self._sizes[epoch]

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the first ones of a uniform epoch."""
        whole = self._all.plan(None, epoch)
        return Plan(epoch, whole.start, whole.ids[: self._sizes[epoch]])


def pruned_at_random(recipe: Recipe, sizes: list[int]) -> Recipe:
    """Return ``recipe`` over random epochs of these numbers of samples."""
    return replace(recipe, sampler=partial(RandomPruning, sizes))


def played(recipe: Recipe, record: Record) -> Recipe:
    """Return ``recipe`` over a record: its cache, and what was visited and scored then."""
    return replace(
        recipe,
        sampler=lambda num_samples, **job: PlayedSampler(record),
        scorer=partial(Player, record),
        backward=None,
    )

"""From the plan of an epoch, or a sampler of the user's, to the batches of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.pytorch.population import Population
from stoker.pytorch.ranks import LazyRanks, Ranks
from stoker.recipes.base import SamplerFactory
from stoker.sampler.uniform import UniformSampler
from stoker.scores import Scores
from stoker.store.tier import Keys


class Draw(NamedTuple):
    """What one batch is to hold."""

    ids: NDArray[np.uint32]
    """``u32[n]``, ids of the base data set."""
    positions: NDArray[np.int64]
    """``i64[n]``, places in the epoch's plan of the whole job."""
    weights: NDArray[np.float32] | None = None
    """``f32[n]``, or None when all are one."""
    keys: NDArray[np.float64] | None = None
    """``f64[n]``, of the cache policy after these accesses; None when it needs none."""
    first: int = 0
    """Place of the first sample among this rank's accesses of the epoch."""
    single: bool = False
    """Whether the sample itself is wanted, not a list of one (``batch_size=None``)."""


class Planner:
    """Makes the global plan of an epoch, and this rank's share of it.

    Plans are pure in seed, epoch and scores, so ranks agree on them without talking.
    """

    def __init__(
        self,
        population: Population,
        make_sampler: SamplerFactory,
        ranks: LazyRanks,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        policy: Policy,
        scores: Scores,
    ) -> None:
        self.next_epoch = 0
        """The epoch that the next iteration takes."""
        self._population = population
        self._make_sampler = make_sampler
        self._ranks = ranks
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._policy = policy
        self._scores = scores
        self._sampler()  # refuses what it must while the user's call is on the stack

    def _sampler(self) -> Any:
        return self._make_sampler(
            len(self._population),
            seed=self._seed,
            shuffle=self._shuffle,
            pad_to=self._ranks.now().world_size,
            drop_last=self._drop_last,
        )

    @property
    def rank_length(self) -> int:
        """Accesses of this rank in each epoch."""
        rank, world_size = self._ranks.now()
        return len(range(rank, self._sampler().length, world_size))

    def order(self, epoch: int) -> Plan:
        """Return the plan of the whole job for ``epoch``, in indices of the population's view."""
        plan: Plan = self._sampler().plan(self._scores, epoch)
        return plan

    def plan(self, epoch: int) -> Plan:
        """Return the plan of the whole job for ``epoch``, in ids of the base data set.

        It knows the plan that follows if the cache policy looks ahead, and scores do not matter.
        """
        following = None
        # Plans of other samplers depend on scores that are not there yet.
        if looks_ahead(self._policy) and self._make_sampler is UniformSampler:
            following = self._with_ids(self.order(epoch + 1), None)
        return self._with_ids(self.order(epoch), following)

    def upcoming(self, epoch: int) -> tuple[NDArray[np.uint32], Keys]:
        """Return this rank's accesses of ``epoch`` ``u32[n]``, and the policy's keys after them."""
        rank, world_size = self._ranks.now()
        plan = self.plan(epoch)
        ids = np.ascontiguousarray(plan.rank_view(rank, world_size))
        positions = np.arange(rank, len(plan), world_size)
        return ids, self._policy.keys(ids, self._scores, plan, positions)

    def _with_ids(self, order: Plan, following: Plan | None) -> Plan:
        ids = self._population.ids(order.ids) if self._population.label else order.ids
        return Plan(order.epoch, order.start, ids, order.weights, following)

    def indices(self) -> Iterator[int]:
        """Yield this rank's share of the next epoch, in indices of the population's view."""
        return iter(self.order(self.next_epoch).rank_view(*self._ranks.now()).tolist())

    def draws(self, plan: Plan, batch_size: int | None, drop_last: bool) -> Iterator[Draw]:
        """Yield this rank's batches of ``plan``; one by one with ``batch_size=None``."""
        rank, world_size = self._ranks.now()
        ids = plan.rank_view(rank, world_size, equal=self._shuffle)
        weights = None if plan.weights is None else plan.weights[rank::world_size]
        size = batch_size or 1
        end = len(ids) - len(ids) % size if drop_last else len(ids)
        for begin in range(0, end, size):
            part = slice(begin, min(begin + size, end))
            wanted = np.ascontiguousarray(ids[part])
            positions = np.arange(part.start, part.stop) * world_size + rank
            yield Draw(
                wanted,
                positions,
                None if weights is None else np.ascontiguousarray(weights[part]),
                self._policy.keys(wanted, self._scores, plan, positions),
                first=begin,
                single=batch_size is None,
            )


class PlanSampler(Sampler[int]):
    """The planned order as a torch sampler, so that ``loader.sampler`` is what users expect.

    Yields this rank's indices of the loader's data set for the epoch that comes next.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def __iter__(self) -> Iterator[int]:
        return self._planner.indices()

    def __len__(self) -> int:
        return self._planner.rank_length


def looks_ahead(policy: Policy) -> bool:
    """Whether the keys of ``policy`` need a plan."""
    return bool(getattr(policy, "looks_ahead", False))


def draws_of(indices: Iterable[Any], population: Population, ranks: Ranks) -> Iterator[Draw]:
    """Yield the batches that a sampler of the user's asks for; it is this rank's own already.

    ``indices`` yields a list of indices of the population's view, or a single index.
    """
    done = 0
    for wanted in indices:
        batch = np.atleast_1d(np.asarray(wanted, np.int64))
        positions = (done + np.arange(len(batch))) * ranks.world_size + ranks.rank
        done += len(batch)
        yield Draw(population.ids(batch), positions, single=np.ndim(wanted) == 0)

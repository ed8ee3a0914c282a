"""Epochs of one rank without a framework: planned, observed, saved, resumed; as simulated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stoker import recipes
from stoker.epoch.batch import BatchSpec, ServedBatch
from stoker.epoch.controller import Begun, Controller, Opened
from stoker.epoch.placing import Placing
from stoker.epoch.ranks import LazyRanks, launched_ranks
from stoker.epoch.records import Records
from stoker.epoch.settings import EpochSettings, Population
from stoker.epoch.state import Owner, RankState
from stoker.errors import ConfigError
from stoker.importance.base import as_scorer
from stoker.jobs.merged import Merged
from stoker.recipes import Recipe
from stoker.recipes.base import make_store
from stoker.sampler.super_epochs import Room
from stoker.scores import Scores
from stoker.sim.job import Job
from stoker.sim.replayed_cache import ReplayedCache
from stoker.source.held import MemorySource
from stoker.store.tier import NullTier
from stoker.types import Outcome

N, BATCH, EPOCHS = 60, 8, 4
RECIPES = [
    "lru",
    "minio",
    "belady",
    "foresight:repeat=2:annealed=0.3",
    "foresight:importance=true:repeat=2:annealed=0.3",
    "shade:repetition=2.0",
]


def losses_of(ids: NDArray[np.uint32], epoch: int) -> NDArray[np.float64]:
    return 0.1 + ((ids.astype(np.float64) * 7 + epoch) % 13)


class Training:
    """A training loop of NumPy arrays around a controller."""

    def __init__(
        self,
        recipe: Recipe,
        num_samples: int = N,
        *,
        seed: int = 0,
        batch_size: int = BATCH,
        epochs: int = EPOCHS,
        ids: NDArray[np.uint32] | None = None,
        rank: int = 0,
        join: Any = None,
    ) -> None:
        self.source = MemorySource([bytes(10)] * num_samples)
        policy = Merged(recipe.policy.for_sizes(self.source.sizes), self.source.sizes)
        self.store = make_store(recipe, policy, self.source, NullTier(policy.regions()))
        count = num_samples if ids is None else len(ids)
        room = Room(np.full(count, 10), 5 * count)
        self.controller = Controller(
            EpochSettings(seed=seed, epochs=epochs, batch_size=batch_size, needs_scores=True),
            Population(num_samples, ids),
            recipe.sampler_for(room),
            policy,
            Scores(num_samples),
            as_scorer(recipe.scorer(num_samples)),
            ranks=LazyRanks(rank, 1 if join is None else 2, launched_ranks),
            records=Records(num_samples),
            join=join,
        )
        placing = Placing(self.store, policy, recipe.shares, rank=rank, is_node_leader=True)
        self.controller.open(Opened(placing, self.store.stats))
        self._token = 0

    def begin(self) -> Begun:
        return self.controller.begin({})

    def batches(self, begun: Begun) -> Iterator[BatchSpec]:
        """Yield batches of an epoch, each of which is observed before the next one."""
        for spec in self.controller.batch_specs(begun):
            served = self.store.serve(spec.ids, spec.keys)
            batch = ServedBatch(
                self._token, begun.walk.start.epoch, served.ids, served.outcomes, spec.positions
            )
            self._token += 1
            self.controller.receive(batch)
            begun.walk.step(len(batch))
            self.controller.observe({"losses": losses_of(batch.ids, batch.epoch)})
            yield spec
        self.controller.end(accuracy=0.5)

    def epoch(self) -> list[BatchSpec]:
        return list(self.batches(self.begin()))

    def state(self) -> dict[str, Any]:
        owner = Owner("numbers", N, 0, "recipe", self.controller.identity(), 0, 1)
        return self.controller.save(owner).to_dict()


def ids_of(specs: list[BatchSpec]) -> list[list[int]]:
    return [spec.ids.tolist() for spec in specs]


def visited(specs: list[BatchSpec]) -> list[int]:
    ids: list[int] = np.sort(np.concatenate([spec.ids for spec in specs])).tolist()
    return ids


def test_each_sample_once_an_epoch_and_its_loss_becomes_its_score() -> None:
    training = Training(recipes.get("minio"))
    first, second = training.epoch(), training.epoch()
    assert visited(first) == visited(second) == list(range(N))
    assert ids_of(first) != ids_of(second)
    assert [len(spec.ids) for spec in first] == [8] * 7 + [4]
    scores = training.controller.observer.scores
    assert (scores.seen == 2).all()
    stats = training.controller.stats()
    assert (stats.accesses, stats.fetched, stats.coverage) == (2 * N, 2 * N, 1.0)
    assert [each.accesses for each in training.controller.records.epochs] == [N, N]  # type: ignore[union-attr]


def test_what_is_known_of_an_epoch_is_recorded_when_the_next_one_begins() -> None:
    training = Training(recipes.get("minio"))
    training.epoch()
    assert training.controller.walk is None
    training.begin()
    scores = training.controller.observer.scores
    assert scores.accuracies[0] == 0.5
    expected = losses_of(np.arange(N, dtype=np.uint32), 0).mean()
    assert scores.losses[0] == pytest.approx(expected)


def test_an_abandoned_epoch_is_over_when_the_next_one_begins() -> None:
    training = Training(recipes.get("minio"))
    batches = training.batches(training.begin())
    next(batches)
    training.controller.end()
    begun = training.begin()
    assert begun.walk.start.epoch == 1
    assert visited(list(training.batches(begun))) == list(range(N))


def test_a_part_of_the_data_set() -> None:
    part = np.array([50, 3, 7, 20, 21, 22, 23, 24, 25], np.uint32)
    training = Training(recipes.get("minio"), ids=part)
    assert visited(training.epoch()) == sorted(part.tolist())


def test_an_observation_says_which_batch_it_speaks_of() -> None:
    training = Training(recipes.get("minio"))
    controller, begun = training.controller, training.begin()
    specs = list(controller.batch_specs(begun))[:2]
    outcomes = np.zeros(BATCH, np.int8)
    one, other = (
        controller.receive(ServedBatch(token, 0, spec.ids, outcomes, spec.positions))
        for token, spec in enumerate(specs)
    )
    with pytest.raises(ConfigError, match="2 are unobserved"):
        controller.observe({"losses": np.ones(BATCH)})
    controller.observe({"losses": np.ones(BATCH)}, other)
    controller.observe({"losses": np.full(BATCH, 2.0)}, one)
    values = controller.observer.scores.values
    assert set(values[one.ids]) == {2.0} and set(values[other.ids]) == {1.0}
    with pytest.raises(ConfigError, match="observed before"):
        controller.observe({"losses": np.ones(BATCH)}, one)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("epoch", "steps"), [(0, 3), (1, 0), (2, 5), (3, 1)])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, epoch: int, steps: int) -> None:
    whole = Training(recipes.get(name))
    for _ in range(epoch):
        whole.epoch()
    state, expected = None, []
    if not steps:
        state = whole.state()
    for number, spec in enumerate(whole.batches(whole.begin()), 1):
        if number > steps:
            expected.append(spec)
        if number == steps:
            state = whole.state()
    for _ in range(epoch + 1, EPOCHS):
        expected += whole.epoch()

    rest = Training(recipes.get(name))
    loaded = RankState.from_dict(state or {})
    assert rest.controller.identity_of(loaded) == loaded.owner.plan
    rest.controller.restore(loaded)
    again = [spec for _ in range(epoch, EPOCHS) for spec in rest.epoch()]
    assert ids_of(again) == ids_of(expected)
    for one, other in zip(again, expected, strict=True):
        np.testing.assert_array_equal(one.positions, other.positions)
        if one.keys is not None:
            np.testing.assert_array_equal(one.keys, other.keys)
    np.testing.assert_array_equal(
        rest.controller.observer.scores.values, whole.controller.observer.scores.values
    )
    assert rest.controller.stats().accesses == whole.controller.stats().accesses


class Together:
    """Two ranks in two threads, who hear each other's arrays."""

    def __init__(self) -> None:
        self._said: list[Any] = [None, None]
        self._barrier = threading.Barrier(2, timeout=30)

    def joined(self, rank: int, world_size: int) -> Any:
        together = self

        class Half:
            def __init__(self) -> None:
                self.rank, self.world_size = rank, world_size

            def gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
                together._said[rank] = rows
                together._barrier.wait()
                said = list(together._said)
                together._barrier.wait()
                return said

        return Half()


def test_ranks_agree_on_scores_and_share_each_epoch() -> None:
    together = Together()
    recipe = recipes.get("shade:repetition=2.0")
    ranks = [Training(recipe, rank=rank, join=together.joined) for rank in range(2)]
    found: list[list[list[BatchSpec]]] = [[], []]

    def train(rank: int) -> None:
        found[rank] = [ranks[rank].epoch() for _ in range(3)]

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(*found, strict=True):
        assert len(one) == len(other)
        places = np.concatenate([spec.positions for spec in one + other])
        assert sorted(places.tolist()) == list(range(N))
    agreed = [training.controller.agreement.agreed for training in ranks]
    assert agreed[0] is not None and agreed[1] is not None
    np.testing.assert_array_equal(agreed[0].values, agreed[1].values)
    assert agreed[0].seen.sum() == 2 * N


class Recorded(ReplayedCache):
    """A simulator's cache that keeps what it is asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[tuple[NDArray[np.uint32], Any]] = []

    def serve(self, ids: NDArray[np.uint32], keys: Any) -> Any:
        self.asked.append((ids, keys))
        return super().serve(ids, keys)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(RECIPES),
    num_samples=st.integers(2, 90),
    batch_size=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_the_simulator_makes_the_same_plans_and_keys(
    name: str, num_samples: int, batch_size: int, seed: int
) -> None:
    recipe = recipes.get(name)
    training = Training(recipe, num_samples, seed=seed, batch_size=batch_size)
    cache = Recorded(recipe, training.source.sizes, 0.5, seed)
    job = Job(recipe, cache, losses_of, EPOCHS, batch_size, seed)
    with cache:
        for _ in range(EPOCHS):
            begun = training.begin()
            assert begun.plan is not None
            specs = list(training.batches(begun))
            steps = list(job.steps())
            assert steps[0].plan.identity == begun.plan.identity
            assert steps[0].plan.start == begun.plan.start
            for spec, (ids, keys) in zip(specs, cache.asked, strict=True):
                assert ids.tolist() == spec.ids.tolist()
                assert (keys is None) == (spec.keys is None)
                if keys is not None:
                    np.testing.assert_array_equal(keys, spec.keys)
            cache.asked.clear()
            assert all((step.served.outcomes != Outcome.SUBSTITUTED).all() for step in steps)

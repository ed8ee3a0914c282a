"""SHADE: the cache against Algorithm 1 in plain Python, step by step, and the parts together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.region import turn_of

from stoker import recipes
from stoker.errors import ConfigError
from stoker.importance.base import Observation
from stoker.policy import Score
from stoker.scores import Scores
from stoker.source.held import MemorySource
from stoker.store import MemoryTier, Store
from stoker.store.arena import Arena
from stoker.types import Outcome

SIZE = 100


class Algorithm1:
    """APP of the paper (Algorithm 1): a priority queue and a ghost cache.

    Entries are (importance, frequency), or (importance, 0) without ``frequency``.
    """

    def __init__(self, capacity: int, frequency: bool = False) -> None:
        self.capacity = capacity
        self.frequency = frequency
        self.queue: dict[int, tuple[float, int]] = {}
        self.ghost: dict[int, tuple[float, int]] = {}

    def access(self, sample: int) -> bool:
        """Serve one sample; returns whether it was a hit."""
        if sample in self.queue:
            return True
        if len(self.queue) < self.capacity:
            # What was never seen has no score yet: it is the first to leave until it has one.
            self.queue[sample] = self.ghost.get(sample, (-math.inf, 0))
        elif sample in self.ghost:
            lowest = min(self.queue, key=lambda other: (self.queue[other], turn_of(other)))
            if self.ghost[sample] >= self.queue[lowest]:
                del self.queue[lowest]
                self.queue[sample] = self.ghost[sample]
        return False

    def trained(self, samples: list[int], losses: list[float]) -> None:
        """Score a batch by equation 6; cached samples move in the queue at once."""
        for sample, loss in zip(samples, losses, strict=True):
            score = float(np.float32(math.log(sum(loss > other for other in losses) + 10)))
            before = self.ghost.get(sample, (0.0, 0))[1]
            self.ghost[sample] = score, before + self.frequency
            if sample in self.queue:
                self.queue[sample] = self.ghost[sample]


BATCHES = st.lists(
    st.lists(
        st.tuples(st.integers(0, 19), st.sampled_from([0.0, 0.5, 0.5, 1.0, 2.0, 3.0])),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=25,
)


@given(batches=BATCHES, capacity=st.integers(1, 12), frequency=st.booleans())
@settings(max_examples=80, deadline=None)
def test_app_matches_algorithm_1(batches, capacity, frequency):
    """Hits, and what is cached after every step, on random accesses with random losses."""
    recipe, plain = recipes.shade(frequency=frequency), Algorithm1(capacity, frequency)
    scorer, scores = recipe.scorer(20), Scores(20)
    arena = Arena(20, capacity * SIZE, mean_size=SIZE, exact=True)
    arena.configure(recipe.policy.regions())
    with Store(MemorySource([bytes([i]) * SIZE for i in range(20)]), MemoryTier(arena)) as store:
        for step, batch in enumerate(batches):
            samples, losses = [i for i, _ in batch], [loss for _, loss in batch]
            for sample in samples:
                one = np.array([sample], np.uint32)
                served = store.serve(one, recipe.policy.keys(one, scores, None, None))
                assert served[0].tobytes() == bytes([sample]) * SIZE
                assert (served.outcomes[0] == Outcome.HIT) == plain.access(sample)
                assert set(arena.list("main").tolist()) == set(plain.queue)
            ids = np.array(samples, np.uint32)
            scorer.update(scores, Observation(ids, step, 0, losses=np.array(losses)))
            plain.trained(samples, losses)
            known = np.flatnonzero(scores.seen).astype(np.uint32)
            store.tier.set_keys(known, recipe.policy.keys(known, scores, None, None))
        arena.verify()


def test_ten_samples_in_one_batch():
    """Ranks 0 to 9 in the order of the losses, so scores of log 10 to log 19."""
    losses = np.array([0.9, 0.1, 0.5, 0.3, 2.0, 0.2, 0.8, 0.05, 1.1, 0.4])
    scores = Scores(10)
    recipes.shade().scorer(10).update(
        scores, Observation(np.arange(10, dtype=np.uint32), 0, 0, losses=losses)
    )
    ranks = np.argsort(np.argsort(losses))
    np.testing.assert_allclose(scores.values, np.log(ranks + 10.0))


def test_the_five_best_of_ten_stay():
    """A cache of five, all ten seen: after one more visit of each it holds the five hardest."""
    recipe = recipes.shade()
    scores = Scores(10)
    ids = np.arange(10, dtype=np.uint32)
    recipe.scorer(10).update(scores, Observation(ids, 0, 0, losses=np.arange(10.0)[::-1].copy()))
    arena = Arena(10, 5 * SIZE, mean_size=SIZE, exact=True)
    arena.configure(recipe.policy.regions())
    with Store(MemorySource([bytes(SIZE)] * 10), MemoryTier(arena)) as store:
        for i in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9, 8):
            one = ids[i : i + 1]
            store.serve(one, recipe.policy.keys(one, scores, None, None))
        assert arena.list("main").tolist() == [0, 1, 2, 3, 4]


def test_constants_reach_the_parts():
    job = {"seed": 1, "shuffle": True, "pad_to": 1, "drop_last": False, "epochs": None}
    recipe = recipes.shade(b0=5, repetition=3, important=0.1)
    sampler = recipe.sampler(50, **job)
    assert (sampler.repetition, sampler.important) == (3, 0.1)
    assert recipe.scorer(50).b0 == 5
    sampler = recipes.shade(steep=0.5, high=2).sampler(50, **job)
    assert (sampler.steep, sampler.high) == (0.5, 2)
    with pytest.raises(ConfigError, match="b0=0"):
        recipes.shade(b0=0)


def test_order_and_entries_as_the_authors_code_has_them_by_parameters():
    recipe = recipes.get("shade:order=hits_first:frequency=true:smoothing=0.01")
    sampler = recipe.sampler(50, seed=1, shuffle=True, pad_to=1, drop_last=False, epochs=None)
    assert (sampler.order, sampler.smoothing) == ("hits_first", 0.01)
    assert recipe.policy == Score(frequency=True)
    with pytest.raises(ConfigError, match=r"order='misses_first' is not known.*spread, hits_first"):
        recipes.get("shade:order=misses_first")

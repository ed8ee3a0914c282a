"""SHADE's cache: the table of scores is the ghost cache, ties enter, keys move at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.region import turn_of

from policy.conftest import NewArena
from stoker.errors import ConfigError
from stoker.policy import Homophily, Score
from stoker.policy.score import with_frequency
from stoker.scores import Scores

NUM_IDS = 12
ROOM = 4
SIZE = 10


@dataclass
class Algorithm1:
    """SHADE's Algorithm 1, read off the paper: a cache, a ghost cache, a priority queue."""

    ties: bool
    queue: dict[int, float] = field(default_factory=dict)
    """Cached samples; those without a score yet rank lowest."""
    ghost: dict[int, float] = field(default_factory=dict)
    """Scores of all samples that were ever seen."""

    def access(self, sample_id: int) -> bool:
        """Return whether it was a hit; insert what the rule admits."""
        if sample_id in self.queue:
            return True
        score = self.ghost.get(sample_id)
        if len(self.queue) < ROOM:
            self.queue[sample_id] = -np.inf if score is None else score
        elif score is not None:
            smallest = min(self.queue, key=lambda i: (self.queue[i], turn_of(i)))
            if self.queue[smallest] < score or (self.queue[smallest] == score and self.ties):
                del self.queue[smallest]
                self.queue[sample_id] = score
        return False

    def learn(self, sample_id: int, score: float) -> None:
        self.ghost[sample_id] = score
        if sample_id in self.queue:
            self.queue[sample_id] = score


some_id = st.integers(0, NUM_IDS - 1)
steps = st.lists(st.one_of(some_id, st.tuples(some_id, st.integers(0, 5))), max_size=120)


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=steps, ties=st.booleans())
def test_app_matches_algorithm_1(
    new_arena: NewArena, steps: list[int | tuple[int, int]], ties: bool
) -> None:
    policy, scores, paper = Score(ties), Scores(NUM_IDS), Algorithm1(ties)
    arena = new_arena(policy, NUM_IDS, ROOM * SIZE)
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            ids = np.array([step[0]], np.uint32)
            scores.update(ids, [step[1]], number)
            arena.set_keys(ids, policy.keys(ids, scores, None, None))
            paper.learn(*step)
        else:
            ids = np.array([step], np.uint32)
            hit = bool(arena.get_many(ids)[2][0])
            assert hit == paper.access(step)
            if not hit:
                arena.put_many(ids, [bytes([step]) * SIZE], policy.keys(ids, scores, None, None))
        assert sorted(paper.queue) == np.flatnonzero(arena.contains(np.arange(NUM_IDS))).tolist()
    arena.verify()
    arena.close()


def test_without_scores_it_keeps_what_came_first(new_arena: NewArena) -> None:
    policy = Score()
    arena = new_arena(policy, NUM_IDS, ROOM * SIZE)
    ids = np.arange(NUM_IDS, dtype=np.uint32)
    arena.put_many(ids, [bytes(SIZE)] * NUM_IDS, policy.keys(ids, None, None, None))
    assert np.flatnonzero(arena.contains(ids)).tolist() == [0, 1, 2, 3]


def test_s14_ties_favour_no_class(new_arena: NewArena) -> None:
    """Of 10 classes, one after the other as folders list them, 100 samples each; half of all fit.

    All score the same, so that which ones stay is left to how ties are broken.
    """
    policy, scores = Score(), Scores(1000)
    ids = np.arange(1000, dtype=np.uint32)
    scores.update(ids, np.ones(1000), 0)
    arena = new_arena(policy, 1000, 500 * SIZE)
    for batch in np.random.default_rng(0).permutation(ids).reshape(-1, 20):
        arena.put_many(batch, [bytes(SIZE)] * 20, policy.keys(batch, scores, None, None))
    held = np.flatnonzero(arena.contains(ids))
    assert len(held) == 500
    assert np.abs(np.bincount(held // 100, minlength=10) - 50).max() <= 5
    interleaved = np.bincount(held % 10, minlength=10)
    assert np.abs(interleaved - 50).max() <= 5


def test_transit_holds_the_batches_on_their_way() -> None:
    def transit(policy: Homophily) -> float:
        return policy.regions()[2].share

    assert transit(Homophily()) == 0.05, "they are not known"
    found = [transit(Homophily().for_batches(share)) for share in (1e-9, 0.01, 0.2, 3.0)]
    assert found == [0.001, 0.01, 0.1, 0.1]
    assert Homophily(transit=0.3).for_batches(0.2) == Homophily(transit=0.3)
    for policy in (Homophily().for_batches(0.2), Homophily(transit=0.3)):
        assert sum(region.share for region in policy.regions()) == pytest.approx(1)


@pytest.mark.parametrize("wrong", [{"importance": 1.0}, {"transit": 0.0}])
def test_homophily_refuses_shares_out_of_range(wrong):
    with pytest.raises(ConfigError, match="out of range"):
        Homophily(**wrong)


def test_homophily_has_room_for_all_three():
    shares = {region.name: region.share for region in Homophily(0.8, transit=0.1).regions()}
    assert shares == pytest.approx({"importance": 0.72, "homophily": 0.18, "transit": 0.1})


entries = st.tuples(
    st.floats(allow_nan=False, width=32), st.integers(0, 2**29 - 1) | st.integers(0, 3)
)


@given(st.lists(entries, min_size=2, max_size=8))
def test_keys_with_frequency_are_ordered_as_pairs(pairs: list[tuple[float, int]]) -> None:
    scores, counts = (np.array(column) for column in zip(*pairs, strict=True))
    keys = with_frequency(scores.astype(np.float64), counts.astype(np.int64))
    for one, key in zip(pairs, keys, strict=True):
        for other, than in zip(pairs, keys, strict=True):
            if np.isfinite([one[0], other[0]]).all():
                assert (key < than) == (one < other)
            elif one[0] != other[0]:
                assert (key < than) == (one[0] < other[0])


def test_of_equal_scores_the_less_accessed_leaves_first() -> None:
    scores = Scores(3)
    ids = np.arange(3, dtype=np.uint32)
    scores.update(ids, np.array([2.5, 2.5, 2.6]), 0)
    scores.update(ids[:1], np.array([2.5]), 1)
    by_pair = Score(frequency=True).keys(ids, scores, None, None)
    assert by_pair[1] < by_pair[0] < by_pair[2]
    by_score = Score().keys(ids, scores, None, None)
    assert by_score[0] == by_score[1]

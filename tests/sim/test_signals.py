"""Neighbours without embeddings: who they are, what they score, and SpiderCache over them."""

import numpy as np
import pytest

from stoker import recipes
from stoker.errors import ConfigError
from stoker.importance.base import Observation
from stoker.scores import Scores
from stoker.sim import replay
from stoker.sim.signals import MadeUpGraph, MadeUpLosses, with_made_up_graph

N = 3000


def scored(graph, ids):
    scores = Scores(N)
    graph.update(scores, Observation(ids, 3, 0))
    assert graph.neighbours is not None
    return scores, graph.neighbours


def lists(found):
    return [set(part.tolist()) for part in map(found.of, range(len(found.ids)))]


def test_neighbours_are_mutual_and_never_oneself():
    every = np.arange(N, dtype=np.uint32)
    _, found = scored(MadeUpGraph(N, degree=20), every)
    near = lists(found)
    for sample in range(0, N, 37):
        assert sample not in near[sample]
        assert len(near[sample]) == found.degree[sample]
        assert all(sample in near[other] for other in near[sample])
    # A sample is likelier in a large group: twice the mean, for geometric sizes.
    assert found.degree.mean() == pytest.approx(40, rel=0.3)


def test_scores_are_the_papers():
    every = np.arange(N, dtype=np.uint32)
    scores, found = scored(MadeUpGraph(N, mixing=0.0, neighbor_max=100), every)
    assert scores.values == pytest.approx(np.log(1 / (found.degree + 1) + 1))
    mixed, _ = scored(MadeUpGraph(N, mixing=0.5, neighbor_max=100), every)
    assert mixed.values.mean() > scores.values.mean()


def test_a_sample_that_comes_twice_is_scored_once():
    scores, found = scored(MadeUpGraph(N), np.array([7, 5, 7], np.uint32))
    assert found.ids.tolist() == [5, 7]
    assert scores.seen[[5, 7]].tolist() == [1, 1]


def test_losses_are_the_same_whether_drawn_before_they_are_asked_for():
    early, late = MadeUpLosses(N, 3), MadeUpLosses(N, 3)
    every = np.arange(N, dtype=np.uint32)
    for epoch in (0, 1, 5, 1):
        early.begin_epoch(epoch)
        assert early(every, epoch).tolist() == late(every, epoch).tolist()
    assert early(every, 1).tolist() != early(every, 2).tolist()


def test_spidercache_substitutes_over_it():
    recipe = with_made_up_graph(recipes.get("spidercache"))
    found, again = (replay(recipe, N, 6, 0.2) for _ in range(2))
    assert found == again
    assert found.after(1).substituted_ratio > 0.05
    assert recipes.get("lru") == with_made_up_graph(recipes.get("lru"))


@pytest.mark.parametrize("wrong", [{"degree": 0}, {"degree": 501}, {"mixing": 0.6}])
def test_what_has_no_meaning_is_refused(wrong):
    with pytest.raises(ConfigError, match="are out of range"):
        MadeUpGraph(10, **wrong)

"""Scorers of a user that derive from no class of ours."""

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.importance import Graph, LossHistory, Neighbours, Observation, Scorer
from stoker.importance.base import as_scorer
from stoker.scores import Scores
from stoker.testing import ScorerConformance


class Least:
    """The two required members and no more."""

    needs = frozenset({"losses"})

    def update(self, scores, observation):
        ids, losses = observation.finite("losses")
        scores.update(ids, losses, observation.step)


class Most(Least):
    """Every optional member too."""

    volatile = np.array([1, 2], np.uint32)
    scores_are_losses = True

    def __init__(self):
        self.called = []
        none = np.empty(0, np.int64)
        self.neighbours = Neighbours.listed(0, none.astype(np.uint32), none, none.astype(np.uint32))

    def begin_epoch(self, scores, epoch):
        self.called.append("begin_epoch")

    def cache_holds(self, samples):
        self.called.append("cache_holds")

    def use_accelerator(self, index):
        self.called.append("use_accelerator")

    def take_scored(self):
        return [(np.array([5], np.uint32), None)]

    def drain(self):
        self.called.append("drain")

    def state_dict(self):
        return {"count": np.array(3)}

    def load_state_dict(self, state):
        self.called.append(int(state["count"]))

    def close(self):
        self.called.append("close")


class TestLeast(ScorerConformance):
    def make_scorer(self):
        return Least()


def call_all(scorer: Scorer) -> None:
    scorer.begin_epoch(Scores(9), 1)
    scorer.cache_holds(5)
    scorer.use_accelerator(lambda table: None)
    scorer.drain()
    scorer.load_state_dict({"count": np.array(3)})
    scorer.close()


def test_a_scorer_of_ours_is_returned_as_it_is():
    scorer = LossHistory()
    assert as_scorer(scorer) is scorer


@pytest.mark.parametrize("make", [Least, LossHistory])
def test_what_a_scorer_lacks_has_defaults(make):
    scorer = as_scorer(make())
    assert isinstance(scorer, Scorer) and scorer.needs == {"losses"}
    assert scorer.volatile.dtype == np.uint32 and not len(scorer.volatile)
    assert not scorer.rescores and not scorer.is_deferred
    assert scorer.scores_are_losses == (make is LossHistory)
    assert scorer.take_scored() == [] and scorer.neighbours is None and scorer.state_dict() == {}
    call_all(scorer)


def test_what_a_scorer_has_is_used():
    own = Most()
    scorer = as_scorer(own)
    assert scorer.rescores and scorer.volatile.tolist() == [1, 2]
    assert scorer.scores_are_losses
    assert scorer.is_deferred and scorer.take_scored()[0].ids.tolist() == [5]
    assert scorer.neighbours is own.neighbours and scorer.state_dict().keys() == {"count"}
    call_all(scorer)
    assert own.called == ["begin_epoch", "cache_holds", "use_accelerator", "drain", 3, "close"]


def test_a_class_that_derives_says_by_overriding_what_it_does():
    class Mine(Scorer):
        needs = frozenset({"losses"})

        def update(self, scores: Scores, observation: Observation) -> None:
            LossHistory().update(scores, observation)

        @property
        def volatile(self):
            return np.arange(3, dtype=np.uint32)

    assert Mine().rescores and not Mine().is_deferred
    assert not LossHistory().rescores


def test_a_graph_keeps_the_index_it_was_given():
    chosen, offered = [], []

    def index(into):
        def make(table):
            into.append(table)
            return Graph(3)._index

        return make

    Graph(3, index=index(chosen)).use_accelerator(index(offered))
    assert len(chosen) == 1 and not offered
    Graph(3).use_accelerator(index(offered))
    assert len(offered) == 1


def test_what_a_scorer_must_have_is_named():
    with pytest.raises(ConfigError, match="object is not a scorer: it lacks needs, update"):
        as_scorer(object())

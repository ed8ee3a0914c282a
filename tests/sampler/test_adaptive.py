import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler import AdaptiveSampler, ImportanceSampler, Sampler, SuperEpochSampler
from stoker.sampler.adaptive import LEVELS
from stoker.scores import Scores
from stoker.testing.sampler_conformance import SamplerConformance

N, CACHE = 200, 0.2


class TestAdaptive(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return AdaptiveSampler(self.num_samples, seed=7, pad_to=pad_to, epochs=20)


def train(sampler, epochs, storage, hits=(CACHE, CACHE + 0.25, CACHE + 0.316, 0.6)):
    """Return the number of the level of each epoch; ``storage(epoch)`` is what it can supply."""
    scores, levels = Scores(N), []
    rng = np.random.default_rng(1)
    for epoch in range(epochs):
        sampler.begin_epoch(scores, epoch)
        level = LEVELS.index(sampler.level_at(scores.snapshot(), epoch))
        levels.append(level)
        missed = 1.0 if epoch == 0 else 1 - hits[level]
        scores.update(np.arange(N), rng.lognormal(size=N), step=epoch)
        # What was asked for, or as much of it as storage has.
        scores.record_epoch(epoch, supply=min(missed, storage(epoch)), hit_ratio=1 - missed)
    return levels


@pytest.mark.parametrize(
    ("supply", "level"), [(2.0, 0), (0.8, 0), (0.78, 0), (0.6, 1), (0.5, 2), (0.3, 3), (0.01, 3)]
)
def test_rises_as_far_as_storage_makes_it_necessary(supply, level):
    levels = train(AdaptiveSampler(N), 14, lambda epoch: supply)
    assert levels[:2] == [0, 0]
    assert levels[6:] == [level] * 8


def test_stands_down_where_storage_keeps_up():
    sampler = AdaptiveSampler(N, seed=3)
    assert train(sampler, 10, lambda epoch: 0.9) == [0] * 10
    scores = Scores(N)
    scores.record_epoch(0, supply=0.9, hit_ratio=0.2)
    assert sampler.describe(scores, 1) == (
        "each sample once an epoch: storage supplied 90% of what training takes"
    )
    assert "not known" in sampler.describe(Scores(N), 0)


def test_follows_storage_that_becomes_slow():
    levels = train(AdaptiveSampler(N), 18, lambda epoch: 0.9 if epoch < 7 else 0.5)
    assert levels[:10] == [0] * 10 and levels[14:] == [2] * 4


def test_one_slow_epoch_does_not_decide():
    assert train(AdaptiveSampler(N), 14, lambda epoch: 0.1 if epoch == 7 else 0.9) == [0] * 14


def test_plans_are_those_of_the_level():
    scores = Scores(N)
    scores.update(np.arange(N), np.arange(N) + 1.0, step=0)
    for epoch in range(2):
        scores.record_epoch(epoch, supply=0.6 if epoch else 1.0, hit_ratio=CACHE * epoch)
    sampler = AdaptiveSampler(N, seed=5)
    twice = SuperEpochSampler(N, seed=5, repeat=2, warm_up=2)
    for epoch in range(6):
        assert sampler.plan(scores, epoch).identity == twice.plan(None, epoch).identity
        assert sampler.foresees(scores, epoch) == (epoch != 2)
    assert (np.bincount(np.concatenate([twice.plan(None, e).ids for e in (2, 3)])) == 2).all()
    scores.record_epoch(1, supply=0.1)
    sampler.begin_epoch(scores, 2)
    important = ImportanceSampler(N, seed=5, repeat=4, warm_up=2)
    assert sampler.plan(scores, 3).identity == important.plan(scores, 3).identity
    assert sampler.foresees(scores, 3) and not sampler.foresees(scores, 6)


def test_the_end_is_uniform():
    sampler = AdaptiveSampler(N, epochs=16)
    assert train(sampler, 16, lambda epoch: 0.1)[14:] == [0, 0]
    assert sampler.foresees(None, 15)


def test_without_evidence_nothing_changes():
    scores = Scores(N)
    for epoch in range(8):
        scores.record_epoch(epoch)
    assert AdaptiveSampler(N).level_at(scores, 6) == LEVELS[0]


def test_refuses_shares_out_of_range():
    for name in ("tolerance", "annealed", "min_ess"):
        with pytest.raises(ConfigError, match=name):
            AdaptiveSampler(10, **{name: -1})

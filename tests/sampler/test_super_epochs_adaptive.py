import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler import AdaptiveSampler, Sampler, SuperEpochSampler
from stoker.sampler.super_epochs import MOST, Room
from stoker.scores import Scores
from stoker.testing.sampler_conformance import SamplerConformance

N, CACHE = 4000, 0.2
ROOM = Room(np.full(N, 100), int(N * 100 * CACHE))


class TestAdaptive(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return AdaptiveSampler(self.num_samples, seed=7, pad_to=pad_to, epochs=20)


def hits_of(choice, short=0.0):
    """What windows really hit: more than is expected of long ones, or less if ``short``."""
    if choice.repeat == 1:
        return CACHE
    longer = max(1.0, choice.window / (choice.repeat * CACHE))
    return max(CACHE, (1 - 1 / choice.repeat) / longer**0.8 - short)


def train(sampler, epochs, storage, short=0.0):
    """Return the choice of each epoch; ``storage(epoch)`` is what storage can supply."""
    scores, choices = Scores(N), []
    for epoch in range(epochs):
        sampler.begin_epoch(scores, epoch)
        choice = sampler.choice_at(scores.snapshot(), epoch)
        choices.append(choice)
        missed = 1.0 if epoch == 0 else 1 - hits_of(choice, short)
        # What was asked for, or as much of it as storage has.
        scores.record_epoch(epoch, supply=min(missed, storage(epoch)), hit_ratio=1 - missed)
    return choices


def repeats(choices):
    return [choice.repeat for choice in choices]


@pytest.mark.parametrize(
    ("supply", "repeat"),
    [(2.0, 1), (0.8, 1), (0.78, 1), (0.7, 2), (0.5, 2), (0.4, 3), (0.25, 4), (0.15, 7), (0.01, 8)],
)
def test_repeats_as_often_as_storage_makes_necessary(supply, repeat):
    choices = train(AdaptiveSampler(N, room=ROOM), 14, lambda epoch: supply)
    assert repeats(choices[:2]) == [1, 1]
    assert repeats(choices[6:]) == [repeat] * 8


@pytest.mark.parametrize("supply", np.linspace(0.13, 0.75, 20))
def test_windows_are_as_long_as_storage_allows(supply):
    """The choice is continuous: what is expected to hit is what storage leaves."""
    last = train(AdaptiveSampler(N, room=ROOM), 14, lambda epoch: supply)[-1]
    expected = (1 - 1 / last.repeat) * min(1.0, last.repeat * CACHE / last.window)
    assert expected == pytest.approx(1 - supply) or last.window == last.repeat
    assert hits_of(last) >= 1 - supply - 1e-9


def test_more_is_done_where_less_hits_than_expected():
    choices = train(AdaptiveSampler(N, room=ROOM), 40, lambda epoch: 0.45, short=0.1)
    assert repeats(choices) == sorted(repeats(choices))
    assert hits_of(choices[2], 0.1) < 0.52
    assert hits_of(choices[-1], 0.1) >= 1 - 0.45 - 0.03
    assert choices[-1].repeat < MOST


def test_stands_down_where_storage_keeps_up():
    sampler = AdaptiveSampler(N, seed=3)
    assert repeats(train(sampler, 10, lambda epoch: 0.9)) == [1] * 10
    scores = Scores(N)
    scores.record_epoch(0, supply=0.9, hit_ratio=0.2)
    assert sampler.describe(scores, 1) == (
        "each sample once an epoch: storage supplied 90% of what training takes"
    )
    assert "not known" in sampler.describe(Scores(N), 0)


def test_follows_storage_that_becomes_slow():
    choices = train(AdaptiveSampler(N), 18, lambda epoch: 0.9 if epoch < 7 else 0.3)
    assert repeats(choices[:10]) == [1] * 10
    assert repeats(choices[14:]) == [4] * 4


def test_one_slow_epoch_does_not_decide():
    choices = train(AdaptiveSampler(N), 14, lambda epoch: 0.1 if epoch == 7 else 0.9)
    assert repeats(choices) == [1] * 14


def test_decisions_come_at_the_end_of_super_epochs():
    choices = train(AdaptiveSampler(N), 30, lambda epoch: 0.35 if epoch < 7 else 0.05)
    for choice, epoch in zip(choices, range(30), strict=True):
        assert choice.begin <= epoch < choice.end
        assert (choice.end - choice.begin) % choice.repeat == 0
    begins = {choice.begin: choice for choice in choices[2:]}
    assert all(choice == begins[choice.begin] for choice in choices[2:])


def test_plans_are_those_of_the_choice():
    scores = Scores(N)
    for epoch in range(2):
        scores.record_epoch(epoch, supply=0.5 if epoch else 1.0, hit_ratio=CACHE * epoch)
    sampler = AdaptiveSampler(N, seed=5, room=ROOM)
    choice = sampler.choice_at(scores, 2)
    assert (choice.begin, choice.repeat) == (2, 2)
    twice = SuperEpochSampler(N, seed=5, repeat=2, warm_up=2, window=choice.window)
    for epoch in range(2, 6):
        assert sampler.plan(scores, epoch).identity == twice.plan(None, epoch).identity
        assert sampler.foresees(scores, epoch) == (epoch != 2)
    assert not sampler.foresees(scores, 6)
    assert (np.bincount(np.concatenate([twice.plan(None, e).ids for e in (2, 3)])) == 2).all()
    assert "2 times in 2 epochs, within windows of 0.4" in sampler.describe(scores, 2)


def test_the_end_is_uniform():
    sampler = AdaptiveSampler(N, epochs=16)
    assert repeats(train(sampler, 16, lambda epoch: 0.1)[14:]) == [1, 1]
    assert sampler.foresees(None, 15)


def test_without_evidence_nothing_changes():
    scores = Scores(N)
    for epoch in range(8):
        scores.record_epoch(epoch)
    assert AdaptiveSampler(N).choice_at(scores, 6).repeat == 1


def test_refuses_shares_out_of_range():
    for name in ("tolerance", "annealed"):
        with pytest.raises(ConfigError, match=name):
            AdaptiveSampler(10, **{name: -1})

"""Super-epochs: exact counts, exact cuts, an even end."""

import itertools

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler import Sampler, SuperEpochSampler, UniformSampler, repeat_share
from stoker.scores import Scores
from stoker.testing.sampler_conformance import SamplerConformance


def visits(sampler: Sampler, epochs: range, num_samples: int) -> np.ndarray:
    ids = np.concatenate([sampler.plan(None, epoch).ids for epoch in epochs])
    return np.bincount(ids, minlength=num_samples)


class TestConformance(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return SuperEpochSampler(self.num_samples, seed=7, pad_to=pad_to, repeat=3)

    def test_visits_everything_until_there_is_something_to_go_by(self, sampler: Sampler) -> None:
        """Over a super-epoch in place of an epoch."""
        alone = self.make_sampler(1)
        assert set(visits(alone, range(3, 6), self.num_samples)) == {3}
        unseen = Scores(self.num_samples)
        assert sampler.plan(unseen, 5).identity == sampler.plan(None, 5).identity


class TestConformanceAtTheEnd(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return SuperEpochSampler(
            self.num_samples, seed=7, pad_to=pad_to, repeat=2, epochs=6, annealed=0.1
        )


@pytest.mark.parametrize("repeat", [1, 2, 3, 4])
@pytest.mark.parametrize("epochs", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("annealed", [0.0, 0.125, 1.0])
def test_every_sample_as_often_as_there_are_epochs(repeat, epochs, annealed) -> None:
    sampler = SuperEpochSampler(50, repeat=repeat, epochs=epochs, annealed=annealed)
    assert set(visits(sampler, range(epochs), 50)) == {epochs}
    for begin in range(0, epochs, repeat):
        until = range(min(begin + repeat, epochs))
        assert set(visits(sampler, until, 50)) == {len(until)}


def test_the_end_is_uniform() -> None:
    sampler = SuperEpochSampler(50, seed=3, repeat=2, epochs=16, annealed=0.125)
    for epoch in range(16):
        assert (set(visits(sampler, range(epoch, epoch + 1), 50)) == {1}) == (epoch >= 14)
    plain = UniformSampler(50, seed=3)
    assert sampler.plan(None, 15).identity == plain.plan(None, 15).identity


def test_the_annealed_share_is_rounded_up_to_epochs() -> None:
    sampler = SuperEpochSampler(200, repeat=2, epochs=30, annealed=0.1)
    uniform = [
        epoch
        for epoch in range(30)
        if sampler.plan(None, epoch).ids.size == 200
        and set(visits(sampler, range(epoch, epoch + 1), 200)) == {1}
    ]
    assert uniform == [27 - 1, 27, 28, 29]  # 27 epochs of super-epochs end with a single one


@pytest.mark.parametrize(("repeat", "share"), [(2, 0.25), (4, 0.75**4)])
def test_the_share_that_repeats(repeat, share) -> None:
    sampler = SuperEpochSampler(20_000, repeat=repeat)
    for epoch in range(repeat):
        counted = repeat_share(visits(sampler, range(epoch, epoch + 1), 20_000))
        assert counted == pytest.approx(share, abs=0.01)


class TestConformanceInGroups(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return SuperEpochSampler(self.num_samples, seed=7, pad_to=pad_to, repeat=3, group=0.3)

    def test_visits_everything_until_there_is_something_to_go_by(self, sampler: Sampler) -> None:
        """Over a super-epoch in place of an epoch."""
        assert set(visits(self.make_sampler(1), range(3, 6), self.num_samples)) == {3}


@pytest.mark.parametrize("group", [0.001, 0.25, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("repeat", [2, 3, 5])
def test_in_groups_every_sample_as_often(repeat, group) -> None:
    sampler = SuperEpochSampler(50, repeat=repeat, group=group, epochs=2 * repeat, annealed=0.0)
    for begin in (0, repeat):
        assert set(visits(sampler, range(begin, begin + repeat), 50)) == {repeat}


def test_the_visits_of_a_group_come_before_those_of_the_next() -> None:
    sampler = SuperEpochSampler(60, repeat=3, group=0.25)
    order = np.concatenate([sampler.plan(None, epoch).ids for epoch in range(3)])
    groups = [set(order[begin : begin + 45].tolist()) for begin in range(0, 180, 45)]
    assert [len(group) for group in groups] == [15] * 4
    assert set.union(*groups) == set(range(60))
    assert not all(a == b for a, b in itertools.pairwise(order[:45].tolist()))
    later = np.concatenate([sampler.plan(None, epoch).ids for epoch in range(3, 6)])
    assert set(later[:45].tolist()) not in groups  # they are drawn anew


def test_without_shuffling_it_is_the_plain_order() -> None:
    plan = SuperEpochSampler(10, shuffle=False, repeat=2).plan(None, 1)
    assert plan.ids.tolist() == list(range(10))


@pytest.mark.parametrize(
    "wrong",
    [
        {"repeat": 0},
        {"epochs": 0},
        {"annealed": -0.1},
        {"annealed": 1.1},
        {"seed": -1},
        {"group": 0},
        {"group": 1.1},
        {"group": float("nan")},
    ],
)
def test_refuses_what_has_no_meaning(wrong) -> None:
    with pytest.raises(ConfigError, match="is out of range"):
        SuperEpochSampler(**{"num_samples": 10, **wrong})

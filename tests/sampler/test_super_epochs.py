"""Super-epochs: exact counts, exact cuts, an even end."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler import Sampler, SuperEpochSampler, UniformSampler
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


class TestConformanceWithStaticSamples(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        static = np.arange(0, self.num_samples, 3, dtype=np.uint32)
        return SuperEpochSampler(
            self.num_samples, seed=7, pad_to=pad_to, repeat=3, window=0.6, static=static
        )

    def test_visits_everything_until_there_is_something_to_go_by(self, sampler: Sampler) -> None:
        """Over a super-epoch in place of an epoch."""
        assert set(visits(self.make_sampler(1), range(3, 6), self.num_samples)) == {3}


@st.composite
def samplers(draw) -> SuperEpochSampler:
    count = draw(st.integers(1, 300))
    static = None
    if draw(st.booleans()):
        chosen = draw(st.sets(st.integers(0, count - 1)))
        static = np.array(sorted(chosen), np.uint32)
    repeat = draw(st.integers(1, 9))
    return SuperEpochSampler(
        count,
        seed=draw(st.integers(0, 2**64 - 1)),
        repeat=repeat,
        epochs=draw(st.none() | st.integers(1, 20)),
        annealed=draw(st.sampled_from([0.0, 0.125, 0.5])),
        warm_up=draw(st.integers(0, 3)),
        window=draw(st.floats(0.01, 1.5)) * repeat,
        static=static,
    )


@given(samplers())
def test_each_sample_exactly_so_often_and_never_close_by(sampler: SuperEpochSampler) -> None:
    last = 20 if sampler.epochs is None else sampler.epochs
    begin, count = 0, sampler.num_samples
    static = [] if sampler.static is None else sampler.static
    while begin < last:
        assert sampler.began(begin) == begin
        end = begin + 1
        while end < last and sampler.began(end) == begin:
            end += 1
        plans = [sampler.plan(None, epoch) for epoch in range(begin, end)]
        if end - begin == sampler.repeat or sampler.epochs is not None:
            assert set(visits(sampler, range(begin, end), count)) == {end - begin}
        for plan in plans:
            assert len(plan) == count
            assert (np.bincount(plan.ids, minlength=count)[static] == 1).all()
            distances = (plan.next_use - np.arange(count))[plan.next_use < count]
            assert not len(distances) or distances.min() >= (sampler.apart or 1)
        begin = end


@given(samplers(), st.integers(0, 12))
def test_any_epoch_is_made_alone(sampler: SuperEpochSampler, epoch: int) -> None:
    again = pickle.loads(pickle.dumps(sampler))
    for other in range(3):
        again.plan(None, other)
    assert again.plan(None, epoch).identity == sampler.plan(None, epoch).identity


@pytest.mark.parametrize("count", [1000, 20_000])
@pytest.mark.parametrize("repeat", [2, 4, 8])
@pytest.mark.parametrize("window", [0.1, 0.2, 0.3])
def test_visits_fall_within_windows(count, repeat, window) -> None:
    """On average; those at the edges of an epoch are a little more."""
    sampler = SuperEpochSampler(count, seed=1, repeat=repeat, window=window * repeat)
    first = np.concatenate([sampler.plan(None, epoch).ids for epoch in range(2 * repeat)])
    where = np.argsort(first, kind="stable").reshape(count, 2 * repeat) / count
    steps = np.diff(where, axis=1)  # between the visits of a sample, in epochs
    assert np.median(steps) == pytest.approx(window, rel=0.25)
    longest = np.sort(steps, axis=1)[:, : 2 * repeat - 2]  # but from a window to the next
    assert np.quantile(longest, 0.9) < 1.6 * window + 0.01
    assert sampler.apart >= 0.4 * window * count


def test_a_window_that_has_begun_goes_on_in_the_next_super_epoch() -> None:
    sampler = SuperEpochSampler(2000, repeat=4, window=0.8)
    last, following = (
        set(sampler.plan(None, epoch).ids[cut].tolist())
        for epoch, cut in ((3, slice(-400, None)), (4, slice(0, 400)))
    )
    assert len(last & following) > 0.5 * len(last)
    elsewhere = set(sampler.plan(None, 2).ids[:400].tolist())
    assert len(elsewhere & following) < 0.3 * len(elsewhere)


def test_orders_differ_from_one_super_epoch_to_the_next() -> None:
    sampler = SuperEpochSampler(2000, repeat=4, window=0.8)
    here, there = (set(sampler.plan(None, epoch).ids[:400].tolist()) for epoch in (1, 5))
    assert len(here & there) < 0.4 * len(here)


def test_neighbours_in_one_visit_are_scattered_in_the_next() -> None:
    """Two samples of a batch meet again in a later one as rarely as by chance in a block."""
    sampler, batch = SuperEpochSampler(20_000, repeat=4, window=0.8), 64
    plan = np.concatenate([sampler.plan(None, epoch).ids for epoch in range(4)])
    batches = plan.reshape(-1, batch)
    where = np.argsort(plan, kind="stable").reshape(-1, 4) // batch
    met = [
        np.unique(where[ids][:, k], return_counts=True)[1].max()
        for ids in batches[:50]
        for k in range(4)
        if (where[ids][:, k] != where[ids[0], k]).any()
    ]
    assert np.mean(met) < 5  # some 30 batches of 64 make a block


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
        {"window": 0},
        {"window": float("inf")},
        {"window": float("nan")},
    ],
)
def test_refuses_what_has_no_meaning(wrong) -> None:
    with pytest.raises(ConfigError, match="is out of range"):
        SuperEpochSampler(**{"num_samples": 10, **wrong})

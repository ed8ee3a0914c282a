"""What all samplers that follow scores share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler import (
    InfoBatchSampler,
    PadsSampler,
    SelectiveSampler,
    UniformSampler,
    WeightedSampler,
)
from tests.sampler.parts import scores_of

SAMPLERS = {
    "weighted": lambda n, **more: WeightedSampler(n, **more),
    "reweighted": lambda n, **more: WeightedSampler(n, reweight=True, uniform_part=0.2, **more),
    "pads": lambda n, **more: PadsSampler(n, repetition=2.5, **more),
    "selective": lambda n, **more: SelectiveSampler(n, warm_up=0, reweight=True, **more),
    "infobatch": lambda n, **more: InfoBatchSampler(n, delta=1, **more),
    "infobatch_fixed": lambda n, **more: InfoBatchSampler(n, delta=1, easiest=0.6, **more),
}
POOR = [
    [1.0] * 9,
    [0.0] * 9,
    [0.0] * 8 + [5.0],
    [-2.0, -1.0, -3.0, -2.0],
    [0.1] * 7,
    [1e-300, 1e300, 1.0],
    [3.0],
    [2.0, 1.0],
]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("values", POOR, ids=str)
@pytest.mark.parametrize("ranks", [1, 4])
def test_poor_scores_still_give_a_plan(name, values, ranks):
    """All equal, all zero, negative, far apart, hardly any."""
    sampler = SAMPLERS[name](len(values), pad_to=ranks)
    scores = scores_of(values)
    plan = sampler.plan(scores, 1)
    assert len(plan) == sampler.length_at(1, scores) > 0
    assert len(plan) % ranks == 0


@pytest.mark.parametrize("name", SAMPLERS)
def test_equal_scores_favour_nobody(name):
    """Over many epochs each sample is visited about equally often, whatever its id."""
    visits = np.zeros(40)
    scores = scores_of(np.full(40, 0.7))
    for epoch in range(0, 900, 3):
        visits += np.bincount(SAMPLERS[name](40).plan(scores, epoch).ids, minlength=40)
    assert visits.min() > 0.7 * visits.mean() and visits.max() < 1.3 * visits.mean()


@given(
    name=st.sampled_from(sorted(SAMPLERS)),
    values=st.lists(st.floats(0, 10), min_size=1, max_size=60),
    unseen=st.sets(st.integers(0, 59)),
    ranks=st.integers(1, 9),
    drop_last=st.booleans(),
    epoch=st.integers(0, 20),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=200, deadline=None)
def test_plans_are_whole(name, values, unseen, ranks, drop_last, epoch, seed):
    """The promised length, valid ids, one prefix for any number of ranks, weights that are sane."""
    n = len(values)
    if drop_last and n < ranks:
        return
    unseen = [i for i in unseen if i < n]
    scores = scores_of(values, unseen=unseen)
    sampler = SAMPLERS[name](n, pad_to=ranks, drop_last=drop_last, seed=seed)
    plan = sampler.plan(scores, epoch)
    bare = SAMPLERS[name](n, seed=seed).plan(scores, epoch)
    assert len(plan) == sampler.length_at(epoch, scores) <= sampler.longest
    assert len(plan) > 0 and len(plan) % ranks == 0
    assert abs(len(plan) - len(bare)) < ranks
    places = np.arange(len(plan)) % len(bare)
    np.testing.assert_array_equal(plan.ids, bare.ids[places])
    assert plan.start == epoch * sampler.longest
    if "info" in name or name == "selective":
        assert len(np.unique(bare.ids)) == len(bare), "without replacement"
    if plan.weights is not None:
        assert (plan.weights > 0).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_shuffle_is_every_sample_in_order(name):
    sampler = SAMPLERS[name](10, shuffle=False, pad_to=4)
    scores = scores_of(np.arange(10.0))
    plan = sampler.plan(scores, 7)
    np.testing.assert_array_equal(plan.ids, np.arange(10))
    assert sampler.length_at(7) == sampler.length_at(7, scores) == 10


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_full_pass_is_the_uniform_one(name):
    assert SAMPLERS[name](50, seed=3).plan(None, 4).identity == (
        UniformSampler(50, seed=3).plan(None, 4).identity
    )


@pytest.mark.parametrize("name", SAMPLERS)
def test_refuses_what_makes_no_sense(name):
    make = SAMPLERS[name]
    for arguments, named in (
        ({"epochs": 0}, "epochs=0"),
        ({"seed": -1}, "seed=-1"),
        ({"pad_to": 0}, "pad_to=0"),
    ):
        with pytest.raises(ConfigError, match=named):
            make(5, **arguments)
    with pytest.raises(ConfigError, match="3 scores for 5 samples"):
        make(5).plan(scores_of([1, 2, 3]), 1)
    with pytest.raises(ConfigError, match="epoch=-1"):
        make(3).plan(scores_of([1, 2, 3]), -1)

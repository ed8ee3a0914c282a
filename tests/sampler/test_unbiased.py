"""Monte Carlo: where a sampler gives weights, weighted gradients have the full one as their mean.

The seeds are fixed, so these tests come out the same every time.
"""

import numpy as np
import pytest

from stoker.recipes import foresight
from stoker.sampler import (
    ImportanceSampler,
    InfoBatchSampler,
    SelectiveSampler,
    SuperEpochSampler,
    WeightedSampler,
)
from tests.sampler.parts import scores_of

N, EPOCHS = 60, 2000
RNG = np.random.default_rng(9)
GRADIENTS = RNG.normal(size=(N, 5))
LOSSES = np.abs(GRADIENTS[:, 0] + 0.3 * RNG.normal(size=N))  # important ones pull one way
GRADIENTS += LOSSES[:, None]


def estimates(sampler, *, scale=None) -> np.ndarray:
    """Return f64[EPOCHS, 5]: per epoch the mean of the weighted gradients (or sum / scale)."""
    scores = scores_of(LOSSES, unseen=[3, 40])
    rows = []
    for epoch in range(EPOCHS):
        plan = sampler.plan(scores, epoch)
        weights = np.ones(len(plan)) if plan.weights is None else plan.weights
        total = (weights[:, None] * GRADIENTS[plan.ids]).sum(axis=0)
        rows.append(total / (scale or len(plan)))
    return np.array(rows)


def deviation(rows: np.ndarray) -> float:
    """Return the greatest distance of a mean from the full gradient, in standard errors."""
    error = rows.std(axis=0, ddof=1) / np.sqrt(len(rows))
    return float((np.abs(rows.mean(axis=0) - GRADIENTS.mean(axis=0)) / error).max())


@pytest.mark.parametrize(
    ("sampler", "scale"),
    [
        (WeightedSampler(N, reweight=True, uniform_part=0.2), None),
        (WeightedSampler(N, reweight=True, uniform_part=0.2, draws=25), None),
        (WeightedSampler(N, reweight=True, uniform_part=0.2, draws=25, replacement=False), None),
        (WeightedSampler(N, reweight=True, uniform_part=0.2, draws=55, replacement=False), None),
        (ImportanceSampler(N), None),
        (ImportanceSampler(N, uniform_part=0.05, min_ess=0.3, clip=1.0), None),
        (SuperEpochSampler(N, repeat=3, annealed=0.0), None),
        (SuperEpochSampler(N, repeat=3, annealed=0.0, window=0.6, static=np.arange(9)), None),
        (SelectiveSampler(N, warm_up=0, full_every=0, reweight=True), None),
        (SelectiveSampler(N, beta=2.0, warm_up=0, full_every=0, reweight=True), None),
        (InfoBatchSampler(N, delta=1, keeps_sum=False), None),
        # InfoBatch keeps the sum over the epoch, which has fewer steps.
        (InfoBatchSampler(N, delta=1), N),
        (InfoBatchSampler(N, delta=1, prune=0.7), N),
        (InfoBatchSampler(N, delta=1, easiest=0.8), N),
    ],
    ids=[
        *("weighted", "weighted25", "distinct25", "distinct55"),
        *("importance", "importance_sharp", "super_epoch", "windows", "selective", "selective2"),
        *("pruned", "infobatch", "infobatch70", "infobatch_fixed"),
    ],
)
def test_weighted_gradients_are_unbiased(sampler, scale):
    assert deviation(estimates(sampler, scale=scale)) < 4


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedSampler(N),
        WeightedSampler(N, draws=25, replacement=False),
        SelectiveSampler(N, warm_up=0, full_every=0),
    ],
    ids=["weighted", "distinct", "selective"],
)
def test_the_test_sees_the_bias_of_draws_without_weights(sampler):
    assert deviation(estimates(sampler)) > 10


def test_s13_pruning_scales_no_step():
    """Each access counts: with weights that keep the sum, their mean was 1.53."""
    sampler = foresight(prune=0.5, annealed=0.0).sampler(
        N, seed=1, shuffle=True, pad_to=1, drop_last=False, epochs=EPOCHS
    )
    assert deviation(estimates(sampler)) < 4
    plan = sampler.plan(scores_of(LOSSES), 0)
    assert plan.weights.mean() == pytest.approx(1)
    assert len(plan) < 0.8 * N
    assert deviation(estimates(InfoBatchSampler(N, delta=1))) > 10

import statistics

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.importance.base import Observation
from stoker.importance.baselines import ReducibleLoss
from stoker.importance.hybrid import Hybrid, Realtime
from stoker.scores import Scores

ALL = np.arange(20, dtype=np.uint32)


def a_pass(scorer: Hybrid, scores: Scores, epoch: int, losses: np.ndarray) -> None:
    """One epoch that visits every sample, and the beginning of the next."""
    scorer.update(scores, Observation(ALL, epoch, epoch, losses=losses))
    scorer.begin_epoch(scores, epoch + 1)


def moving(epoch: int) -> np.ndarray:
    """Losses in which the ranks of samples 3 and 17 swap in each epoch, and no others move."""
    losses = ALL.astype(np.float64)
    if epoch % 2:
        losses[[3, 17]] = losses[[17, 3]]
    return losses


def test_samples_whose_rank_moves_are_volatile() -> None:
    scores = Scores(20)
    scorer = Hybrid(20, cache_samples=8)
    scorer.begin_epoch(scores, 0)
    assert not scores.ready
    for epoch in range(2):
        a_pass(scorer, scores, epoch, moving(epoch))
        assert not scores.ready and not scores.volatile.any() and len(scorer.volatile) == 0
    a_pass(scorer, scores, 2, moving(2))
    assert scores.ready
    assert scorer.volatile.tolist() == [3, 17] == np.flatnonzero(scores.volatile).tolist()


def test_the_variance_is_that_of_the_percentile_ranks() -> None:
    rng = np.random.default_rng(4)
    scores, scorer = Scores(20), Hybrid(20, cache_samples=20)
    ranks = []
    for epoch in range(5):
        losses = rng.random(20)
        ranks.append([(losses <= own).mean() for own in losses])
        a_pass(scorer, scores, epoch, losses)
    expected = [statistics.variance(of_one) for of_one in zip(*ranks, strict=True)]
    np.testing.assert_allclose(scorer.rank_variance, expected)


def test_unseen_samples_have_no_variance_and_are_not_volatile() -> None:
    scores, scorer = Scores(20), Hybrid(20, cache_samples=80, max_warm_up=2)
    for epoch in range(2):
        seen = ALL[:5]
        scorer.update(scores, Observation(seen, epoch, epoch, losses=moving(epoch)[:5]))
        scorer.begin_epoch(scores, epoch + 1)
    assert np.isnan(scorer.rank_variance[5:]).all()
    assert scorer.volatile.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("overlap", "ready"), [(0.74, True), (0.75, False)])
def test_warm_up_ends_above_the_overlap_not_at_it(overlap: float, ready: bool) -> None:
    """S' of four samples of which three stay: 3 / 4 of them."""
    scores, scorer = Scores(20), Hybrid(20, cache_samples=16, overlap=overlap)
    first, second, third = ALL.astype(np.float64), ALL.astype(np.float64), ALL.astype(np.float64)
    second[[0, 19, 1, 12]] = [19, 0, 12, 1]
    third[[0, 19, 5]] = [19, 0, 17.5]
    a_pass(scorer, scores, 0, first)
    a_pass(scorer, scores, 1, second)
    before = set(scorer.state_dict()["candidates"].tolist())
    a_pass(scorer, scores, 2, third)
    after = set(scorer.state_dict()["candidates"].tolist())
    assert (before, after) == ({0, 1, 12, 19}, {0, 1, 5, 19})
    assert scores.ready is ready


def test_variances_are_let_go_of_once_the_set_is_found() -> None:
    scores, scorer = Scores(20), Hybrid(20, cache_samples=8, max_warm_up=2)
    for epoch in range(2):
        assert scorer.state_dict()["mean"].size == 20
        a_pass(scorer, scores, epoch, moving(epoch))
    assert scorer.state_dict()["mean"].size == 0
    again = Hybrid(20, cache_samples=8)
    again.load_state_dict(scorer.state_dict())
    a_pass(again, scores, 2, moving(2))
    assert scores.ready
    assert again.volatile.tolist() == scorer.volatile.tolist() == [3, 17]
    with pytest.raises(ConfigError, match="state of 20 samples"):
        Hybrid(21, cache_samples=8).load_state_dict(scorer.state_dict())


def test_warm_up_ends_after_its_longest_time() -> None:
    rng = np.random.default_rng(0)
    scores, scorer = Scores(20), Hybrid(20, cache_samples=8, overlap=1.0, max_warm_up=4)
    for epoch in range(4):
        assert not scores.ready or epoch == 0
        a_pass(scorer, scores, epoch, rng.random(20))
    assert scores.ready
    kept = scorer.volatile
    for epoch in range(4, 7):
        a_pass(scorer, scores, epoch, rng.random(20))
        np.testing.assert_array_equal(scorer.volatile, kept)


def test_another_score_can_be_ranked() -> None:
    scores = Scores(20)
    scorer = Hybrid(20, cache_samples=8, of=ReducibleLoss(np.ones(20)))
    a_pass(scorer, scores, 0, moving(0))
    np.testing.assert_array_equal(scores.values, moving(0) - 1)


def test_the_cache_must_be_known() -> None:
    scores, scorer = Scores(20), Hybrid(20)
    a_pass(scorer, scores, 0, moving(0))
    with pytest.raises(ConfigError, match="give cache_samples"):
        a_pass(scorer, scores, 1, moving(1))


@pytest.mark.parametrize(
    "bad",
    [
        {"num_samples": 0},
        {"share": 0.0},
        {"share": 1.5},
        {"overlap": -0.1},
        {"overlap": 2.0},
        {"max_warm_up": 1},
        {"max_warm_up": 5000},
    ],
)
def test_bad_arguments_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Hybrid(**{"num_samples": 20, **bad})  # type: ignore[arg-type]


def test_another_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="21 scores for a Hybrid of 20"):
        Hybrid(20, 8).begin_epoch(Scores(21), 0)
    with pytest.raises(ConfigError, match="state of 21 samples"):
        Hybrid(20, 8).load_state_dict(Hybrid(21, 8).state_dict())


def test_realtime_scores_everything_once_there_is_a_model() -> None:
    scores, scorer = Scores(20), Realtime(20)
    scorer.begin_epoch(scores, 0)
    assert len(scorer.volatile) == 0
    scorer.update(scores, Observation(ALL, 0, 0, losses=moving(0)))
    scorer.begin_epoch(scores, 1)
    np.testing.assert_array_equal(scorer.volatile, ALL)
    with pytest.raises(ConfigError, match="num_samples=0"):
        Realtime(0)

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.importance.base import Observation
from stoker.importance.baselines import InBatchRank
from stoker.sampler.draws import scores_or_median
from stoker.scores import Scores


def scored(losses: list[float], b0: float = 10.0) -> list[float]:
    """Return the scores of one batch."""
    scores = Scores(len(losses))
    ids = np.arange(len(losses), dtype=np.uint32)
    InBatchRank(b0).update(scores, Observation(ids, 0, 0, losses=np.array(losses)))
    return scores.values.tolist()


def test_ten_samples_by_hand() -> None:
    """Eq. 6 of SHADE written out for a mini-batch of ten, with a tie of two."""
    losses = [0.9, 2.3, 0.1, 0.4, 1.7, 0.4, 3.0, 0.2, 1.1, 0.05]
    exceeded = [5, 8, 1, 3, 7, 3, 9, 2, 6, 0]
    assert scored(losses) == pytest.approx([np.log(count + 10) for count in exceeded])


def test_the_share_of_the_top_fifth() -> None:
    """With ranks of large batches the top fifth holds .233 of the mass at batches of 128."""
    values = np.sort(scored(np.random.default_rng(0).random(128).tolist()))
    assert values[-26:].sum() / values.sum() == pytest.approx(0.233, abs=0.015)


@settings(deadline=None)
@given(
    st.lists(st.floats(-5, 5).map(lambda loss: round(loss, 1)), max_size=30),
    st.floats(1, 100),
)
def test_counts_as_the_equation_says(losses: list[float], b0: float) -> None:
    counts = [
        sum(own > other for k, other in enumerate(losses) if k != i) for i, own in enumerate(losses)
    ]
    if losses:
        assert scored(losses, b0) == pytest.approx([np.log(count + b0) for count in counts])


def test_an_outlier_has_a_bounded_say() -> None:
    assert scored([1.0, 2.0, 1e300]) == pytest.approx([np.log(10), np.log(11), np.log(12)])


def test_a_loss_that_is_not_finite_takes_no_part() -> None:
    assert scored([1.0, np.nan, 2.0, np.inf]) == pytest.approx([np.log(10), 0, np.log(11), 0])


def test_unseen_samples_score_as_the_batch_median() -> None:
    scores = Scores(40)
    rng = np.random.default_rng(2)
    for step in range(3):
        ids = np.arange(11 * step, 11 * step + 11, dtype=np.uint32)
        InBatchRank().update(scores, Observation(ids, step, 0, losses=rng.random(11)))
    assert scores_or_median(scores)[33:] == pytest.approx(np.log(5 + 10))


@pytest.mark.parametrize("b0", [0.0, 0.5, -1.0, np.nan, np.inf])
def test_a_bias_that_makes_scores_negative_is_refused(b0: float) -> None:
    with pytest.raises(ConfigError, match="b0="):
        InBatchRank(b0)

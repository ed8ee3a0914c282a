import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.importance.baselines import SelectiveBackward


def test_samples_are_kept_as_often_as_their_percentile_says() -> None:
    """Four losses, beta 2: kept with 1/16, 4/16, 9/16 and always."""
    rng, kept = np.random.default_rng(0), np.zeros(4)
    for _ in range(4000):
        kept += SelectiveBackward(beta=2).weights([1.0, 2.0, 3.0, 4.0], rng) > 0
    np.testing.assert_allclose(kept / 4000, [1 / 16, 4 / 16, 9 / 16, 1], atol=0.03)


def test_the_percentile_is_that_of_the_history() -> None:
    """After a thousand small losses each large one is kept, whatever its batch."""
    rng, backward = np.random.default_rng(1), SelectiveBackward(beta=8, history=1000)
    backward.weights(np.linspace(0, 1, 1000), rng)
    assert (backward.weights([5.0, 6.0, 7.0], rng) == 1).all()
    assert not backward.weights(np.linspace(0.1, 0.2, 50), rng).any()


def test_the_history_forgets() -> None:
    rng, backward = np.random.default_rng(1), SelectiveBackward(history=3)
    backward.weights([1.0, 2.0, 3.0, 4.0], rng)
    assert backward.state_dict()["losses"].tolist() == [2.0, 3.0, 4.0]


def test_the_mean_is_over_those_kept() -> None:
    weights = SelectiveBackward().weights(np.arange(64.0), np.random.default_rng(2))
    assert weights.dtype == np.float32
    assert 0 < (weights > 0).sum() < 64
    assert weights.mean() == pytest.approx(1)


@pytest.mark.parametrize("losses", [[2.0] * 5, [0.0] * 5])
def test_losses_that_are_all_equal_are_all_kept(losses: list[float]) -> None:
    assert SelectiveBackward().weights(losses, np.random.default_rng(0)).tolist() == [1.0] * 5


def test_losses_that_are_not_finite_are_kept_and_forgotten() -> None:
    backward = SelectiveBackward(beta=50)
    weights = backward.weights([np.nan, 1.0, np.inf, 9.0], np.random.default_rng(0))
    assert weights[0] > 0 and weights[2] > 0
    assert backward.state_dict()["losses"].tolist() == [1.0, 9.0]
    assert backward.weights([], np.random.default_rng(0)).tolist() == []


def test_state_goes_round() -> None:
    one, other = SelectiveBackward(history=50), SelectiveBackward(history=50)
    losses = np.random.default_rng(3).random((4, 30))
    for batch in losses[:2]:
        one.weights(batch, np.random.default_rng(0))
    other.load_state_dict(one.state_dict())
    for batch in losses[2:]:
        np.testing.assert_array_equal(
            one.weights(batch, np.random.default_rng(7)),
            other.weights(batch, np.random.default_rng(7)),
        )


@pytest.mark.parametrize(
    "bad", [{"beta": -1.0}, {"beta": np.inf}, {"history": 0}, {"history": 2.5}, {"history": True}]
)
def test_bad_arguments_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SelectiveBackward(**bad)  # type: ignore[arg-type]


def test_one_loss_per_sample() -> None:
    with pytest.raises(ConfigError, match="one per sample"):
        SelectiveBackward().weights(1.0, np.random.default_rng(0))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6),
    st.integers(1, 12),
    st.floats(0, 4),
)
def test_keeps_what_a_plain_reading_keeps(
    batches: list[list[int]], history: int, beta: float
) -> None:
    backward, past = SelectiveBackward(beta, history), []
    one, other = np.random.default_rng(0), np.random.default_rng(0)
    for batch in batches:
        weights = backward.weights(np.array(batch, np.float64), one)
        past = (past + batch)[-history:]
        draws = other.random(len(batch))
        shares = [sum(loss <= own for loss in past) / len(past) for own in batch]
        kept = [draw < share**beta for draw, share in zip(draws, shares, strict=True)]
        assert (weights > 0).tolist() == kept

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.importance.base import Observation, Scorer
from stoker.importance.baselines import LossHistory
from stoker.scores import Scores

IDS = np.array([4, 1, 2], np.uint32)


def test_a_signal_has_one_row_for_each_id() -> None:
    with pytest.raises(ConfigError, match=r"losses have shape \(2,\) for 3 ids"):
        Observation(IDS, 0, 0, losses=np.zeros(2))
    with pytest.raises(ConfigError, match=r"embeddings have shape \(3,\).*vector"):
        Observation(IDS, 0, 0, embeddings=np.zeros(3, np.float32))
    with pytest.raises(ConfigError, match="labels"):
        Observation(IDS, 0, 0, labels=np.zeros((3, 1), np.int64))


def test_a_missing_signal_is_named() -> None:
    observation = Observation(IDS, 0, 0, losses=np.ones(3))
    assert observation.signal("losses") is observation.losses
    with pytest.raises(ConfigError, match=r"needs embeddings.*pass embeddings="):
        observation.signal("embeddings")
    with pytest.raises(ConfigError, match="pass logits= and labels="):
        observation.signal("gradient_norms")


def test_rows_that_are_not_finite_are_left_out() -> None:
    embeddings = np.array([[1, 2], [np.nan, 0], [0, np.inf]], np.float32)
    observation = Observation(IDS, 0, 0, losses=np.array([1.0, np.inf, 2.0]), embeddings=embeddings)
    ids, losses = observation.finite("losses")
    assert (ids.tolist(), losses.tolist()) == ([4, 2], [1.0, 2.0])
    ids, rows = observation.finite("embeddings")
    assert (ids.tolist(), rows.tolist()) == ([4], [[1.0, 2.0]])


def test_losses_that_are_not_finite_keep_their_scores() -> None:
    scores, scorer = Scores(5), LossHistory()
    assert isinstance(scorer, Scorer)
    scorer.update(scores, Observation(IDS, 0, 0, losses=np.array([1.0, 2.0, 3.0])))
    scorer.update(scores, Observation(IDS, 1, 0, losses=np.array([np.nan, -np.inf, 4.0])))
    assert scores.values.tolist() == [0, 2, 4, 0, 1]
    assert scores.seen.tolist() == [0, 1, 2, 0, 1]

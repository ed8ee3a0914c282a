import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.importance.base import Observation
from stoker.importance.baselines import ReducibleLoss
from stoker.scores import Scores


def test_what_cannot_be_learned_is_taken_away() -> None:
    """A wrong label has a high loss and a high reference: there is nothing to gain from it."""
    reference = np.array([0.5, 4.0, 0.0])
    scorer, scores = ReducibleLoss(reference), Scores(3)
    reference[:] = 9
    ids = np.array([2, 1, 0], np.uint32)
    scorer.update(scores, Observation(ids, 0, 0, losses=np.array([1.0, 3.5, 2.0])))
    assert scores.values.tolist() == [1.5, -0.5, 1.0]


def test_a_reference_of_another_data_set_is_refused() -> None:
    observation = Observation(np.array([0], np.uint32), 0, 0, losses=np.ones(1))
    with pytest.raises(ConfigError, match="2 losses for 3 samples"):
        ReducibleLoss(np.ones(2)).update(Scores(3), observation)


@pytest.mark.parametrize("reference", [[], [1.0, np.nan], [[1.0]], 1.0])
def test_a_reference_that_is_no_loss_per_sample_is_refused(reference: object) -> None:
    with pytest.raises(ConfigError, match="reference has shape"):
        ReducibleLoss(reference)  # type: ignore[arg-type]

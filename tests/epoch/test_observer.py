"""Which batch an observation speaks of, and scores in the order of the steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.epoch.batch import ServedBatch
from stoker.epoch.observer import PATIENCE, Arrived, Observer
from stoker.errors import ConfigError
from stoker.importance import Hybrid, InBatchRank, LossHistory
from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.scores import Scores

N, BATCH = 40, 4


class LastLoss(Scorer):
    """Scores are losses; keeps the observations."""

    needs: frozenset[Signal] = frozenset({"losses"})  # type: ignore[assignment]

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def update(self, scores: Scores, observation: Observation) -> None:
        self.seen.append(observation)
        scores.update(observation.ids, observation.signal("losses"), observation.step)


class Deferred(LastLoss):
    """Writes scores only when it is drained."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[Scores, Observation]] = []
        self._done: list[Any] = []

    def update(self, scores: Scores, observation: Observation) -> None:
        self._waiting.append((scores, observation))

    def drain(self) -> None:
        for scores, observation in self._waiting:
            super().update(scores, observation)
            self._done.append((observation.ids, None))
        self._waiting.clear()

    def take_scored(self) -> list[Any]:
        done, self._done = self._done, []
        return done


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[int], int | None]] = []

    def observed(
        self,
        ids: NDArray[np.uint32],
        losses: NDArray[np.float64],
        token: int | None = None,
        epoch: int | None = None,
    ) -> None:
        self.told.append(("observed", ids.tolist(), epoch))

    def scored(
        self,
        ids: NDArray[np.uint32],
        neighbours: Neighbours | None,
        scores: Scores,
        epoch: int | None = None,
    ) -> None:
        self.told.append(("scored", ids.tolist(), epoch))


class Slow:
    """Losses that are on their way until they are told to be there, or waited for."""

    def __init__(self, loss: float) -> None:
        self.has_arrived = False
        self._loss = loss

    def arrays(self) -> dict[Signal, NDArray[Any]]:
        self.has_arrived = True
        return {"losses": np.full(BATCH, self._loss)}


def batch_of(number: int, epoch: int = 0) -> ServedBatch:
    ids = np.arange(number * BATCH, (number + 1) * BATCH, dtype=np.uint32) % N
    return ServedBatch(number, epoch, ids, np.zeros(BATCH, np.int8), ids.astype(np.int64))


def observer_of(scorer: Scorer | None = None, **options: Any) -> tuple[Observer, Heard]:
    heard = Heard()
    return Observer(Scores(N), scorer or LastLoss(), heard, **options), heard


def test_batches_are_scored_in_the_order_of_their_steps_however_they_arrive() -> None:
    scorer = LastLoss()
    observer, heard = observer_of(scorer)
    slow = [Slow(float(number)) for number in range(4)]
    for number in range(4):
        observer.add(observer.batch(observer.hand_out(batch_of(number))), slow[number], 0.0)
    slow[1].has_arrived = slow[2].has_arrived = True
    observer.add(observer.batch(observer.hand_out(batch_of(4))), Slow(4.0), 0.0)
    assert not scorer.seen, "the first one is still on its way"
    slow[0].has_arrived = True
    observer.add(observer.batch(observer.hand_out(batch_of(5))), Slow(5.0), 0.0)
    assert [each.step for each in scorer.seen] == [0, 1, 2]
    scores = observer.scores  # waits for the others
    assert [each.step for each in scorer.seen] == list(range(6))
    assert scores.values[: 6 * BATCH].tolist() == [i // BATCH for i in range(6 * BATCH)]
    assert [kind for kind, _, _ in heard.told] == ["observed", "scored"] * 6
    assert observer.take_loss() == (sum(range(6)) * BATCH, 6 * BATCH)
    assert observer.take_loss() == (0.0, 0)


def test_a_deferred_scorer_is_drained_before_scores_are_read() -> None:
    observer, heard = observer_of(Deferred())
    observer.add(observer.batch(observer.hand_out(batch_of(0))), Arrived(Slow(2.0).arrays()), 0.0)
    assert [kind for kind, _, _ in heard.told] == ["observed"]
    assert observer.scores.values[:BATCH].tolist() == [2.0] * BATCH
    assert heard.told[-1] == ("scored", [0, 1, 2, 3], None)


def test_what_is_scored_again_is_no_step_of_training() -> None:
    observer, heard = observer_of()
    ids = np.array([3, 5], np.uint32)
    with pytest.warns(RuntimeWarning, match="1 samples are not finite"):
        observer.rescore(ids, 2, {"losses": np.array([1.0, np.nan])})
    assert observer.step == 0 and observer.take_loss() == (0.0, 0)
    assert heard.told == [("observed", [3], 2), ("scored", [3], 2)]
    assert observer.non_finite == 1


@pytest.mark.parametrize("scorer", [LossHistory(), Hybrid(N, N), InBatchRank()])
def test_a_run_of_steps_is_scored_as_they_are_one_by_one(scorer: Scorer) -> None:
    ids = np.random.default_rng(0).permutation(N).astype(np.uint32)[: 5 * BATCH + 1]
    losses = np.random.default_rng(1).uniform(0, 3, len(ids))
    at_once, one_by_one = observer_of(scorer)[0], observer_of(scorer)[0]
    at_once.score_run(ids, 0, losses, BATCH)
    for start in range(0, len(ids), BATCH):
        part = slice(start, start + BATCH)
        one_by_one.score(ids[part], 0, {"losses": losses[part]})
    assert at_once.step == one_by_one.step == 6
    for name in ("values", "last", "seen"):
        rows = [getattr(observer.scores, name) for observer in (at_once, one_by_one)]
        np.testing.assert_array_equal(*rows)


def test_a_batch_of_an_epoch_that_is_over_is_refused() -> None:
    observer, _ = observer_of()
    batch = observer.hand_out(batch_of(0))
    observer.begin_epoch()
    with pytest.raises(ConfigError, match="earlier epoch"):
        observer.batch(batch)
    with pytest.raises(ConfigError, match="no unobserved batch"):
        observer.batch()
    with pytest.raises(ConfigError, match="iterate first"):
        observer.weighed()


def test_a_restored_state_replaces_what_is_under_way() -> None:
    observer, _ = observer_of()
    saved = observer.scores.arrays()
    observer.add(observer.batch(observer.hand_out(batch_of(0))), Slow(9.0), 0.0)
    observer.restore(7, (1.5, 3), saved)
    assert observer.step == 7 and observer.take_loss() == (1.5, 3)
    assert not observer.scores.seen.any()


def test_hunger_is_told_once_and_ends_with_a_score() -> None:
    observer, _ = observer_of(needed=True)
    with pytest.warns(RuntimeWarning, match="needs losses") as caught:
        for number in range(2 * PATIENCE):
            last = observer.hand_out(batch_of(number))
    assert len(caught) == 1 and caught[0].filename == __file__
    assert observer.is_starved
    observer.add(last, Arrived(Slow(1.0).arrays()), 0.0)
    assert not observer.is_starved

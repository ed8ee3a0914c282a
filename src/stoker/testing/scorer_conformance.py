"""What every scorer must do, as tests to inherit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import ArrayLike

from stoker.errors import ConfigError
from stoker.importance.base import Observation, Scorer, Signal, as_scorer
from stoker.scores import Scores

NUM_CLASSES = 4


class ScorerConformance:
    """Subclass it as ``class TestMine(ScorerConformance)`` and return yours from ``make_scorer``.

    It trains on a synthetic data set of ``num_samples`` ids, whose signals depend on the id
    and the epoch alone, as they would with a model that learns.
    """

    num_samples = 48
    batch_size = 8

    def make_scorer(self) -> Scorer:
        """Return a new scorer over ``num_samples`` ids; two of them behave alike."""
        raise NotImplementedError

    def _made(self) -> Scorer:
        return as_scorer(self.make_scorer())

    @pytest.fixture
    def scorer(self) -> Iterator[Scorer]:
        """A new scorer for each test."""
        scorer = self._made()
        yield scorer
        scorer.close()

    @pytest.fixture
    def scores(self) -> Scores:
        """Scores in which nothing has been seen."""
        return Scores(self.num_samples)

    def observation(self, ids: ArrayLike, step: int = 0, epoch: int = 0) -> Observation:
        """Return all signals of these samples in that epoch."""
        ids = np.asarray(ids, np.uint32)
        rng = np.random.default_rng([5, epoch])
        losses = rng.gamma(2.0, 1.0, self.num_samples)
        norms = rng.uniform(0, np.sqrt(2), self.num_samples)
        labels = np.arange(self.num_samples) % NUM_CLASSES
        embeddings = rng.standard_normal((self.num_samples, 6)) + 3 * np.eye(NUM_CLASSES, 6)[labels]
        return Observation(
            ids,
            step,
            epoch,
            losses=losses[ids],
            gradient_norms=norms[ids],
            embeddings=embeddings[ids].astype(np.float32),
            labels=labels[ids],
        )

    def give(self, scorer: Scorer, scores: Scores, observation: Observation) -> None:
        """Have one batch scored, and wait for its scores."""
        scorer.update(scores, observation)
        scorer.drain()

    def train(
        self, scorer: Scorer, scores: Scores, epoch: int, rank: int = 0, world_size: int = 1
    ) -> None:
        """Visit every sample of this rank once; the step counts over the epochs."""
        order = np.random.default_rng([9, epoch]).permutation(self.num_samples)[rank::world_size]
        batches = np.array_split(order, max(len(order) // self.batch_size, 1))
        for index, ids in enumerate(batches):
            self.give(scorer, scores, self.observation(ids, epoch * len(batches) + index, epoch))

    def test_is_a_scorer(self, scorer: Scorer) -> None:
        """It has every member of the protocol and needs signals that exist."""
        assert isinstance(scorer, Scorer)
        assert scorer.needs <= set(get_args(Signal))
        assert scorer.needs

    def test_score_lands_on_the_given_ids(self, scorer: Scorer, scores: Scores) -> None:
        """Those samples, and no others, are seen once, at that step, with finite scores."""
        ids = np.random.default_rng(3).permutation(self.num_samples)[: self.batch_size]
        self.give(scorer, scores, self.observation(ids, step=7))
        assert np.flatnonzero(scores.seen).tolist() == sorted(ids.tolist())
        assert set(scores.last[ids]) == {7} and set(scores.seen[ids]) == {1}
        assert np.isfinite(scores.values).all()

    def test_scores_that_are_losses_are_just_that(self, scorer: Scorer, scores: Scores) -> None:
        """Where scores are said to be losses: those of the last visit, whatever the batch was."""
        for epoch in range(2):
            for ids in np.array_split(np.arange(self.num_samples), 5):
                seen = self.observation(ids, epoch=epoch)
                self.give(scorer, scores, seen)
                if scorer.scores_are_losses:
                    np.testing.assert_array_equal(seen.losses, scores.values[ids])

    def test_score_belongs_to_the_sample(self, scorer: Scorer, scores: Scores) -> None:
        """The order of the samples within their batch does not matter."""
        ids = np.random.default_rng(3).permutation(self.num_samples)[: self.batch_size]
        self.give(scorer, scores, self.observation(ids))
        other, scorer = Scores(self.num_samples), self._made()
        self.give(scorer, other, self.observation(np.sort(ids)))
        scorer.close()
        np.testing.assert_allclose(other.values, scores.values, rtol=1e-5)

    def test_is_pure_given_its_state(self, scorer: Scorer, scores: Scores) -> None:
        """Two scorers that were shown the same agree; nothing else in the world changes."""
        world = np.random.get_state(legacy=False)["state"]["key"].copy()  # noqa: NPY002
        other, twin = Scores(self.num_samples), self._made()
        for epoch in range(3):
            for one, table in ((scorer, scores), (twin, other)):
                one.begin_epoch(table, epoch)
                self.train(one, table, epoch)
        twin.close()
        _assert_same(scores, other)
        after = np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002
        np.testing.assert_array_equal(after, world)

    def test_what_it_is_shown_stays_as_it_was(self, scorer: Scorer, scores: Scores) -> None:
        """The observation may be used by others."""
        shown, kept = self.observation(range(8)), self.observation(range(8))
        self.give(scorer, scores, shown)
        for name in get_args(Signal):
            np.testing.assert_array_equal(getattr(shown, name), getattr(kept, name))

    def test_a_missing_signal_is_refused(self, scorer: Scorer, scores: Scores) -> None:
        """With its name, and without a change; the scorer still works afterwards."""
        for name in sorted(scorer.needs):
            shown = {
                signal: getattr(self.observation([1, 2]), signal)
                for signal in get_args(Signal)
                if signal != name
            }
            with pytest.raises(ConfigError, match=name):
                self.give(scorer, scores, Observation(np.array([1, 2], np.uint32), 0, 0, **shown))
        assert not scores.seen.any()
        self.give(scorer, scores, self.observation([1, 2]))
        assert np.flatnonzero(scores.seen).tolist() == [1, 2]

    def test_what_is_not_finite_keeps_its_score(self, scorer: Scorer, scores: Scores) -> None:
        """A NaN here or an infinity there never gets into the scores."""
        self.give(scorer, scores, self.observation(range(8)))
        before = scores.values[:2].copy()
        shown = self.observation(range(8), step=1)
        signals: dict[str, Any] = {name: getattr(shown, name) for name in get_args(Signal)}
        for name in ("losses", "gradient_norms", "embeddings"):
            signals[name][0] = np.nan
            signals[name][1] = np.inf
        self.give(scorer, scores, Observation(shown.ids, 1, 0, **signals))
        np.testing.assert_array_equal(scores.values[:2], before)
        assert scores.seen[:8].tolist() == [1, 1, 2, 2, 2, 2, 2, 2]
        assert np.isfinite(scores.values).all()

    def test_a_repeated_id_counts_twice(self, scorer: Scorer, scores: Scores) -> None:
        """Sampling with replacement puts an id twice into a batch."""
        self.give(scorer, scores, self.observation([5, 3, 5, 2]))
        assert scores.seen[[2, 3, 5]].tolist() == [1, 1, 2]
        assert np.isfinite(scores.values).all()

    def test_an_empty_batch_changes_nothing(self, scorer: Scorer, scores: Scores) -> None:
        """A rank may have no sample left."""
        self.give(scorer, scores, self.observation([]))
        assert not scores.seen.any()

    def test_a_batch_of_one(self, scorer: Scorer, scores: Scores) -> None:
        """The last batch of an epoch may be that small."""
        self.give(scorer, scores, self.observation([4]))
        assert scores.seen[4] == 1 and np.isfinite(scores.values[4])

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_samples_that_are_all_alike_score_alike(
        self, scorer: Scorer, scores: Scores, value: float
    ) -> None:
        """One class, equal losses, equal embeddings, or all of them zero."""
        ids = np.arange(self.num_samples, dtype=np.uint32)
        for epoch in range(3):
            scorer.begin_epoch(scores, epoch)
            for step, batch in enumerate(np.split(ids, self.num_samples // self.batch_size)):
                alike = np.full(len(batch), value)
                self.give(
                    scorer,
                    scores,
                    Observation(
                        batch,
                        step,
                        epoch,
                        losses=alike,
                        gradient_norms=alike,
                        embeddings=np.full((len(batch), 6), value, np.float32),
                        labels=np.zeros(len(batch), np.int64),
                    ),
                )
            assert np.isfinite(scores.values).all()
        scorer.begin_epoch(scores, 3)
        last = scores.values[ids[-self.batch_size :]]
        np.testing.assert_allclose(last, last[0])

    def test_an_epoch_begins_once(self, scorer: Scorer, scores: Scores) -> None:
        """A second call of ``begin_epoch`` changes nothing."""
        for epoch in range(3):
            scorer.begin_epoch(scores, epoch)
            self.train(scorer, scores, epoch)
        scorer.begin_epoch(scores, 3)
        volatile, kept = scorer.volatile, scores.snapshot()
        scorer.begin_epoch(scores, 3)
        _assert_same(scores, kept)
        np.testing.assert_array_equal(scorer.volatile, volatile)

    def test_state_goes_round(self, scorer: Scorer, scores: Scores) -> None:
        """A scorer loaded in the middle of an epoch continues exactly as the other."""
        for epoch in range(2):
            scorer.begin_epoch(scores, epoch)
            self.train(scorer, scores, epoch)
        scorer.begin_epoch(scores, 2)
        self.give(scorer, scores, self.observation(range(self.batch_size), 90, 2))
        again, other = self._made(), Scores(self.num_samples)
        other.restore(**scores.arrays())
        state = scorer.state_dict()
        assert all(isinstance(array, np.ndarray) for array in state.values())
        again.load_state_dict(state)
        for epoch in range(2, 5):
            for one, table in ((scorer, scores), (again, other)):
                one.begin_epoch(table, epoch)
                self.train(one, table, epoch)
            _assert_same(scores, other)
            np.testing.assert_array_equal(scorer.volatile, again.volatile)
        again.close()

    def test_ranks_agree(self) -> None:
        """Ranks that see disjoint halves and exchange their scores stay alike."""
        ranks = [(self._made(), Scores(self.num_samples)) for _ in range(2)]
        for epoch in range(4):
            for rank, (scorer, scores) in enumerate(ranks):
                self.train(scorer, scores, epoch, rank, world_size=2)
            _exchange([scores for _, scores in ranks], epoch)
            for scorer, scores in ranks:
                scorer.begin_epoch(scores, epoch + 1)
            _assert_same(ranks[0][1], ranks[1][1])
            np.testing.assert_array_equal(ranks[0][0].volatile, ranks[1][0].volatile)
        for scorer, _ in ranks:
            scorer.close()


def _exchange(tables: list[Scores], epoch: int) -> None:
    """Give every rank the rows of the rank that saw the sample in this epoch."""
    order = np.random.default_rng([9, epoch]).permutation(len(tables[0]))
    arrays = [table.arrays() for table in tables]
    owner = np.empty(len(order), np.int64)
    for rank in range(len(tables)):
        owner[order[rank :: len(tables)]] = rank
    index = np.arange(len(order))
    merged = {
        name: np.stack([rows[name] for rows in arrays])[owner, index]
        for name in ("values", "last", "seen")
    }
    for table, rows in zip(tables, arrays, strict=True):
        table.restore(**{**rows, **merged})


def _assert_same(one: Scores, other: Scores) -> None:
    for name, array in one.arrays().items():
        np.testing.assert_array_equal(other.arrays()[name], array, err_msg=name)

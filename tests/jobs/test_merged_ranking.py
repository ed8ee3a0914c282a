"""Percentiles against their definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.jobs.merged import Ranking


@given(st.lists(st.integers(-9, 9) | st.just(None), min_size=1, max_size=40))
def test_all_scores_at_once(scores: list[int | None]) -> None:
    values = np.array([-np.inf if s is None else float(s) for s in scores])
    ranking = Ranking()
    assert ranking.is_stale(values, len(values))
    ranking.learn(values)
    known = [s for s in scores if s is not None]
    expected = [0 if s is None else sum(k <= s for k in known) / len(known) for s in scores]
    np.testing.assert_allclose(ranking.percentiles(values), expected, rtol=1e-6)


def test_it_learns_anew_when_as_many_scores_came_as_are_known() -> None:
    ranking = Ranking()
    assert ranking.is_stale(np.ones(5), 100)
    ranking.learn(np.arange(20.0))
    assert not ranking.is_stale(np.ones(20), 100)
    assert ranking.is_stale(np.ones(1), 100)


def test_a_score_below_all_known_ones_is_still_seen() -> None:
    ranking = Ranking()
    ranking.learn(np.arange(10.0))
    assert ranking.percentiles(np.array([-5.0, 99.0])).tolist() == [np.float32(0.1), 1.0]

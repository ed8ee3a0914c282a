"""Who is on the H-list, for iCache and for ImPACT's set S beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.policy import HighLow, StaticSet
from stoker.sampler import SelectiveSampler
from stoker.scores import Scores

H, L, S = HighLow.HIGH, HighLow.LOW, StaticSet.STATIC


def scored(values: list[float | None]) -> Scores:
    """Return scores with these values, None for samples never seen."""
    scores = Scores(len(values))
    seen = [i for i, value in enumerate(values) if value is not None]
    scores.update(seen, [values[i] for i in seen], step=1)
    return scores


def plan(ids: list[int]) -> Plan:
    return Plan(0, 0, np.array(ids, np.uint32))


def test_the_most_important_share_of_the_selected_is_high() -> None:
    scores = scored([5, 1, 4, 2, 3, 9, 0, 6, 7, 8])
    places = HighLow(h_share=0.7).places(scores, plan([3, 9, 5, 1, 8, 4, 0, 2, 7, 6]), 10)
    assert np.flatnonzero(places == L).tolist() == [1, 3, 6]  # 2 of 10 are lower than 1 and 2


def test_the_hardest_are_high_however_large_their_score() -> None:
    values = np.random.default_rng(0).lognormal(0, 3, 1000)
    places = HighLow().places(scored(values.tolist()), plan(list(range(1000))), 1000)
    assert (places == H).sum() == 700
    assert values[places == H].min() >= values[places == L].max()


def test_samples_left_out_of_the_plan_are_high_only_above_the_list() -> None:
    scores = scored([10, 1, 20, 30, 2, 15])
    places = HighLow(h_share=0.5).places(scores, plan([0, 1, 4, 5]), 6)
    assert places.tolist() == [H, L, H, H, L, H]
    scores = scored([10, 1, 5, 3, 2, 15])
    places = HighLow(h_share=0.5).places(scores, plan([0, 1, 4, 5]), 6)
    assert places.tolist() == [H, L, L, L, L, H]


def test_samples_never_seen_are_high_and_count_as_such() -> None:
    scores = scored([1, None, 3, None, 2, None])
    places = HighLow(h_share=0.5).places(scores, plan([0, 1, 2, 3, 4]), 6)
    assert places.tolist() == [L, H, L, H, L, H]  # 2 of 5, and those are the unknown ones
    assert (HighLow().places(scored([None] * 4), plan([0, 1]), 4) == H).all()


def test_ties_are_cut_where_the_share_ends() -> None:
    places = HighLow(h_share=0.5).places(scored([1.0] * 10), plan([9, 1, 8, 2, 7, 3]), 10)
    assert np.flatnonzero(places == H).tolist() == [1, 8, 9]  # the first of the plan


def test_repeated_samples_count_once() -> None:
    repeated = plan([3, 3, 3, 0, 1, 1, 2])
    places = HighLow(h_share=0.5).places(scored([1, 2, 3, 4]), repeated, 4)
    assert places.tolist() == [L, L, H, H]
    places = HighLow(h_share=0.75).places(scored([1, 1, 1, 1]), repeated, 4)
    assert places.tolist() == [H, H, L, H]


def test_all_is_high_while_the_scorer_warms_up() -> None:
    scores = scored([1, 2, 3, 4])
    scores.set_volatile([1])
    scores.ready = False
    ids = np.arange(4, dtype=np.uint32)
    for policy in (HighLow(), StaticSet()):
        assert (policy.places(scores, plan([0, 1, 2, 3]), 4) == H).all()
    assert np.isneginf(StaticSet().keys(ids, scores, None, None)).all()
    scores.ready = True
    assert StaticSet().keys(ids, scores, None, None).tolist() == [1, 2, 3, 4]


def test_the_volatile_samples_are_static() -> None:
    scores = scored([1, 2, 3, 4, 5, 6])
    scores.set_volatile([0, 5])
    places = StaticSet(others=HighLow(h_share=0.5)).places(scores, plan([0, 1, 2, 3, 4, 5]), 6)
    assert places.tolist() == [S, L, L, H, H, S]
    regions = StaticSet(share=0.25, others=HighLow(start=0.8)).regions()
    assert [region.name for region in regions] == ["H", "L", "S"]
    assert [region.share for region in regions] == pytest.approx([0.6, 0.15, 0.25])


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(HighLow, {"h_share": 0}), (HighLow, {"start": 1}), (StaticSet, {"share": 1.5})],
)
def test_shares_out_of_range_are_refused(kind: Any, wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="is out of range"):
        kind(**wrong)


# --- a share of all samples ---


def test_moving_takes_the_share_of_all_samples_whatever_is_selected() -> None:
    values = [5.0, 1, 4, 2, 3, 9, 0, 6, 7, 8]
    policy = HighLow(h_share=0.7, split="moving")
    for ids in ([3, 9, 5, 1, 8, 4, 0, 2, 7, 6], [5, 9, 8], [6]):
        assert np.flatnonzero(policy.places(scored(values), plan(ids), 10) == L).tolist() == [
            1,
            3,
            6,
        ]


def test_moving_gives_high_more_of_the_accesses_in_a_selective_epoch() -> None:
    scores = scored(np.random.default_rng(0).random(3000).tolist())
    sampler = SelectiveSampler(3000, warm_up=0, full_every=3)
    shares = {}
    for split in ("fixed", "moving"):
        plans = [sampler.plan(scores, epoch) for epoch in range(3)]
        places = [HighLow(split=split).places(scores, each, 3000) for each in plans]
        shares[split] = [np.mean(p[e.ids] == H) for p, e in zip(places, plans, strict=True)]
    assert shares["fixed"] == pytest.approx([0.7] * 3, abs=0.01)
    selective = 1 - 0.3**1.33  # of the mass of percentile^.33, the part above .3
    assert shares["moving"] == pytest.approx([selective, selective, 0.7], abs=0.01)


def test_moving_keeps_samples_never_seen_high_and_equal_ones_together() -> None:
    policy = HighLow(h_share=0.5, split="moving")
    places = policy.places(scored([1, None, 3, None, 2, None]), plan([0, 1]), 6)
    assert places.tolist() == [L, H, L, H, L, H]
    assert (policy.places(scored([1.0] * 4), plan([0]), 4) == H).all()
    assert (policy.places(scored([None] * 4), plan([0]), 4) == H).all()


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="split='loose' is not known: use one of fixed, moving"):
        HighLow(split="loose")  # type: ignore[arg-type]

"""iCache's split by frequency, and SpiderCache's elastic one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.policy import ElasticSplit, FrequencySplit, HighLow, Shares, StaticSet
from stoker.scores import Scores
from stoker.store.arena import Arena


def test_shares_follow_the_accesses() -> None:
    split, scores = FrequencySplit(), Scores(3)
    assert isinstance(split, Shares)
    assert split.shares(scores, 0, None, {}) == pytest.approx({"H": 0.9, "L": 0.1})
    assert split.shares(scores, 1, None, {"H": 70, "L": 30}) == pytest.approx({"H": 0.7, "L": 0.3})
    assert split.shares(scores, 2, None, {"H": 0, "L": 0}) == pytest.approx({"H": 0.9, "L": 0.1})
    assert split.shares(scores, 2, None, {"L": 5}) == pytest.approx({"H": 0.0, "L": 1.0})


def test_the_static_region_has_its_share_after_the_warm_up() -> None:
    split, scores = FrequencySplit(static="S", static_share=0.2), Scores(3)
    scores.ready = False
    assert split.shares(scores, 3, None, {"H": 5}) == {"H": 1.0, "L": 0.0, "S": 0.0}
    scores.ready = True
    shares = split.shares(scores, 4, None, {"H": 30, "L": 10, "S": 99})
    assert shares == pytest.approx({"H": 0.6, "L": 0.2, "S": 0.2})


counts = st.integers(0, 10**6)


@given(
    capacity=st.integers(1 << 20, 1 << 40),
    part=st.floats(0.0, 1.0),
    high=counts,
    low=counts,
    static=st.booleans(),
)
def test_l_cache_never_below_one_package(
    capacity: int, part: float, high: int, low: int, static: bool
) -> None:
    """Neither by the shares nor by what an arena makes of them."""
    package = 1 + int((capacity * (0.74 if static else 0.99) - 1) * part)
    split = FrequencySplit(static="S" if static else None).for_cache(capacity, package)
    shares = split.shares(Scores(1), 1, None, {"H": high, "L": low})
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share >= 0 for share in shares.values())
    assert int(capacity * shares["L"]) >= package


@pytest.mark.parametrize("package", [1, 333_333, 700_001])
@pytest.mark.parametrize("policy", [HighLow(), StaticSet()])
def test_l_cache_has_room_for_its_package_in_an_arena(package: int, policy: Any) -> None:
    static = "S" if isinstance(policy, StaticSet) else None
    with Arena(10, 1_000_003, 1000) as arena:
        arena.configure(policy.regions())
        total = sum(region["budget"] for region in arena.stats()["regions"].values())
        # What was asked for, of which rounding took a few bytes.
        split = FrequencySplit(static=static).for_cache(1_000_003, package)
        for high in (0, 1, 500, 10**6):
            arena.divide(split.shares(Scores(1), 1, None, {"H": high, "L": 1}))
            budgets = {name: r["budget"] for name, r in arena.stats()["regions"].items()}
            assert budgets["L"] >= package
            assert sum(budgets.values()) == total <= 1_000_003


def test_a_cache_smaller_than_a_package_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for a package of 2000"):
        FrequencySplit().for_cache(1000, 2000)
    with pytest.raises(ConfigError, match="start=1"):
        FrequencySplit(start=1)
    with pytest.raises(ConfigError, match="floor"):
        FrequencySplit(floor=0.9, static="S")


# Ten epochs are over. The deviation of the scores grew for five epochs and fell then, in a straight
# line; the accuracy grew by .02 an epoch, also in a straight line, which smoothing leaves alone.
DEVIATIONS = np.array([1.0, 2, 3, 4, 5, 4, 3, 2, 1, 0])
ACCURACIES = 0.5 + 0.02 * np.arange(10)


def test_elastic_ratio_follows_equations() -> None:
    """By hand: u = .02 / (.01 + .02) = 2/3; (10/40)^(5/3) = .099213; .9 - .1 x .099213."""
    split = ElasticSplit(start=0.9, end=0.8, m=5, gamma=0.01)
    assert split.growth(ACCURACIES) == pytest.approx(0.02)
    assert split.ratio(DEVIATIONS, ACCURACIES, 10, 40) == pytest.approx(0.8900787, abs=1e-7)
    # Eq. 5: sigma rises, or is flat, in the first seven epochs: 1 2 3 4 5 | 2 3 4 5 4 | 3 4 5 4 3.
    for epoch in range(8):
        assert split.ratio(DEVIATIONS[:epoch], ACCURACIES[:epoch], epoch, 40) == 0.9
    # Once it fell beta stays 1, whatever comes after.
    later = np.concatenate([DEVIATIONS, np.arange(20.0)])
    assert split.falls(later)
    # No growth: u = 0, a straight line from r_start to r_end.
    flat = np.full(10, 0.7)
    assert split.ratio(DEVIATIONS, flat, 20, 40) == pytest.approx(0.85)
    assert split.ratio(DEVIATIONS, ACCURACIES[::-1], 20, 40) == pytest.approx(0.85)
    # At the end it is r_end, and beyond it stays there.
    for epoch in (40, 50):
        assert split.ratio(DEVIATIONS, ACCURACIES, epoch, 40) == pytest.approx(0.8)


def test_growth_is_that_of_the_smoothed_accuracy() -> None:
    """Against a Savitzky-Golay filter written as what it is: polynomials fitted to windows."""
    rng = np.random.default_rng(3)
    noisy = ACCURACIES + rng.normal(0, 0.01, 10)
    smooth = np.empty(10)
    for i in range(10):
        begin = min(max(i - 2, 0), 5)
        window = np.arange(begin, begin + 5)
        smooth[i] = np.polyval(np.polyfit(window, noisy[window], 2), i)
    expected = (smooth[-1] - smooth[-6]) / 5
    assert ElasticSplit().growth(noisy) == pytest.approx(expected)
    assert ElasticSplit().growth(np.where(np.arange(10) % 2, np.nan, noisy)) != expected


def test_elastic_shares_read_the_history_up_to_the_epoch() -> None:
    scores = Scores(4)
    for epoch in range(12):
        scores.update([0, 1, 2, 3], np.arange(4.0) * (20 - epoch), step=epoch)
        scores.record_epoch(epoch, accuracy=0.5 + 0.02 * epoch)
    split = ElasticSplit()
    shares = split.shares(scores, 10, 40, {})
    assert shares["importance"] == pytest.approx(0.8900787, abs=1e-7)
    assert sum(shares.values()) == pytest.approx(1)
    assert split.shares(scores, 10, None, {})["importance"] == 0.9  # nobody knows how long it takes
    assert split.shares(scores, 4, 40, {})["importance"] == 0.9


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.signal", None)
    assert ElasticSplit().growth(ACCURACIES[:2]) == 0
    with pytest.raises(ConfigError, match=r"stoker\[importance\]"):
        ElasticSplit().growth(ACCURACIES)


@pytest.mark.parametrize(
    "wrong", [{"start": 0.7}, {"end": 0}, {"m": 1}, {"gamma": 0}, {"window": 4}, {"order": 5}]
)
def test_constants_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        ElasticSplit(**wrong)  # type: ignore[arg-type]

"""Windows that go with a cache."""

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler.super_epochs import Room, Windows, unfitted

N = 10_000
EQUAL = np.full(N, 100)
UNLIKE = (np.random.default_rng(0).lognormal(0, 0.6, N) * 90_000).astype(np.int64)


def test_equal_sizes_have_nothing_static_and_windows_that_fit() -> None:
    fit = Room(EQUAL, EQUAL.sum() // 5).fit(4, seed=1)
    assert fit.static is None
    assert fit.window == pytest.approx(0.8)


def test_half_of_the_cache_is_for_the_smallest_of_unlike_sizes() -> None:
    room = Room(UNLIKE, int(0.2 * UNLIKE.sum()))
    fit = room.fit(4, seed=1)
    assert UNLIKE[fit.static].sum() / UNLIKE.sum() == pytest.approx(0.1, abs=0.001)
    assert UNLIKE[fit.static].max() <= np.delete(UNLIKE, fit.static).min()
    assert fit.window == pytest.approx(4 * 0.1 / 0.9, rel=0.01)


def test_what_is_given_counts() -> None:
    room = Room(EQUAL, EQUAL.sum() // 5)
    fit = room.fit(4, seed=1, static=0.75)
    assert len(fit.static) == 0.15 * N
    assert fit.window == pytest.approx(4 * 0.05 / 0.85, rel=0.01)
    assert not np.array_equal(fit.static, room.fit(4, seed=2, static=0.75).static)
    assert room.fit(4, seed=1, window=2.5).window == 2.5
    assert unfitted(N, 4, 2.5).window == 2.5
    assert room.fit(4, seed=1, static=0.0).static is None


def test_visits_stay_apart_however_small_the_cache() -> None:
    for capacity in (0, 1, EQUAL.sum() // 100):
        window = Room(EQUAL, capacity).fit(4, seed=1).window
        assert Windows.of(N, 4, window / 4).apart >= N / 40 * 0.9


def test_nothing_is_static_if_windows_became_too_short() -> None:
    small = Room(UNLIKE, int(0.06 * UNLIKE.sum())).fit(4, seed=1)
    assert small.static is None
    assert small.window == pytest.approx(0.24, rel=0.01)


def test_a_cache_of_everything() -> None:
    fit = Room(EQUAL, 2 * EQUAL.sum()).fit(2, seed=1)
    assert fit.window == 2 and fit.static is None
    everything = Room(EQUAL, 2 * EQUAL.sum()).fit(2, seed=1, static=1.0)
    assert len(everything.static) == N
    assert Room(EQUAL * 0, 0).share == 1
    with pytest.raises(ConfigError, match="capacity=-1"):
        Room(EQUAL, -1)

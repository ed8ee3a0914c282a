"""The closed forms against plain simulation, exact small cases and published figures."""

import heapq
from collections import OrderedDict

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler import ess, repeat_share
from stoker.sim import limits

N, DRAWS = 500, 40_000
ZIPF = 1 / np.arange(1, N + 1) ** 0.8


def draws(p, seed=0):
    return np.random.default_rng(seed).choice(len(p), DRAWS, p=p / p.sum()).tolist()


def lru_hits(accesses, k):
    cached, hits = OrderedDict(), 0
    for i in accesses:
        if i in cached:
            hits += 1
            cached.move_to_end(i)
            continue
        cached[i] = None
        if len(cached) > k:
            cached.popitem(last=False)
    return hits


def belady_hits(accesses, k):
    """Keep, of the newcomer and the cached, those that are needed soonest."""
    upcoming, following = {}, [0] * len(accesses)
    for t in range(len(accesses) - 1, -1, -1):
        following[t] = upcoming.get(accesses[t], len(accesses))
        upcoming[accesses[t]] = t
    cached, hits, latest = {}, 0, []
    for t, i in enumerate(accesses):
        hits += i in cached
        cached[i] = following[t]
        heapq.heappush(latest, (-following[t], i))
        while len(cached) > k:
            due, out = heapq.heappop(latest)
            if cached.get(out) == -due:  # else it was used since
                del cached[out]
    return hits


def shuffles(epochs, seed=0):
    rng = np.random.default_rng(seed)
    return [i for _ in range(epochs) for i in rng.permutation(N).tolist()]


@pytest.mark.parametrize("c", [0.05, 0.2, 0.4, 0.6, 0.8])
class TestAgainstSimulation:
    def test_lru_over_epochs(self, c):
        accesses = shuffles(40)
        measured = lru_hits(accesses, c * N) / (len(accesses) - N)
        assert limits.lru_epochs(c) == pytest.approx(measured, abs=0.01)

    def test_random_over_epochs(self, c):
        rng = np.random.default_rng(1)
        cached, hits = [], 0
        accesses = shuffles(40)
        for t, i in enumerate(accesses):
            if i in cached:
                hits += t >= 2 * N
            elif len(cached) < c * N:
                cached.append(i)
            else:
                cached[rng.integers(len(cached))] = i
        measured = hits / (len(accesses) - 2 * N)
        assert limits.random_epochs(c) == pytest.approx(measured, abs=0.01)

    def test_lru_under_draws(self, c):
        measured = lru_hits(draws(ZIPF), c * N) / DRAWS
        cold = N / DRAWS  # each sample's first access is a miss that a steady state has not
        assert limits.lru_draws(ZIPF, c * N) == pytest.approx(measured, abs=0.01 + cold * c)

    @pytest.mark.parametrize("p", [ZIPF, np.ones(N)], ids=["zipf", "equal"])
    def test_belady_under_draws(self, p, c):
        measured = belady_hits(draws(p), c * N) / DRAWS
        cold = N / DRAWS
        assert limits.belady_draws(p, c * N) == pytest.approx(measured, abs=0.02 + cold)

    def test_top_k(self, c):
        measured = np.mean(np.array(draws(ZIPF)) < c * N)
        assert limits.top_k(ZIPF, c * N) == pytest.approx(measured, abs=0.01)

    def test_super_epochs_bound_belady_over_them(self, c):
        rng = np.random.default_rng(2)
        small, repeat = 100, 4
        accesses = []
        for _ in range(10):
            accesses += rng.permutation(np.repeat(np.arange(small), repeat)).tolist()
        distinct = [
            len(set(accesses[start : start + small])) for start in range(0, len(accesses), small)
        ]
        q = 1 - np.mean(distinct) / small
        assert limits.super_epoch_repeats(repeat) == pytest.approx(q, abs=0.02)
        measured = belady_hits(accesses, c * small) / len(accesses)
        assert measured <= limits.super_epochs(c, q) + 1e-9

    def test_order_of_the_rules(self, c):
        lru, best, known = (
            rule(ZIPF, c * N) for rule in (limits.lru_draws, limits.top_k, limits.belady_draws)
        )
        assert lru < best < known


def test_lru_is_what_the_papers_measured():
    assert np.round(limits.lru_epochs([0.2, 0.4, 0.6, 0.8]) * 100).tolist() == [2, 9, 23, 48]


def test_equal_draws():
    assert limits.top_k(np.ones(10), 2.5) == pytest.approx(0.25)
    assert limits.lru_draws(np.ones(10), 3) == pytest.approx(0.3)


def test_a_cache_for_everything_and_one_for_nothing():
    p = np.array([0.5, 0.5, 0.0])
    for rule in (limits.top_k, limits.lru_draws, limits.belady_draws):
        assert rule(p, 2) == pytest.approx(1)
        assert rule(p, 0) == 0
    assert limits.uniform([0, 0.3, 2]).tolist() == [0, 0.3, 1]
    assert limits.lru_epochs([0, 1, 2]).tolist() == [0, 1, 1]


def test_shade_repeats_what_is_cached():
    log_ranks = np.ones(100)
    log_ranks[:20] = 0.233 / 20 * 80 / (1 - 0.233)
    assert limits.shade(log_ranks, 20, 3) == pytest.approx(0.70, abs=0.005)
    assert limits.shade(log_ranks, 50, 3) == 1


def test_small_samples_first():
    sizes = [4, 1, 3, 2]
    assert [limits.smallest_first(sizes, b) for b in (0, 1, 2, 3, 6, 9, 10)] == [
        0,
        0.25,
        0.25,
        0.5,
        0.75,
        0.75,
        1,
    ]


def test_most_repeats_is_that_of_the_most_even_counts():
    assert limits.most_repeats([1, 0.5, 0.25]).tolist() == [0, 0.5, 0.75]
    for distinct in range(20, 101):
        counts = np.bincount(np.arange(100) % distinct, minlength=100)
        q = 1 - distinct / 100
        assert limits.most_repeats(ess(counts) / 100) == pytest.approx(q)
    uneven = np.random.default_rng(1).multinomial(100, np.full(100, 0.01))
    assert limits.most_repeats(ess(uneven) / 100) > repeat_share(uneven)
    with pytest.raises(ConfigError, match="ess="):
        limits.most_repeats(0)


def test_super_epochs():
    assert np.round(limits.super_epoch_repeats([1, 2, 4]), 2).tolist() == [0, 0.25, 0.32]
    assert limits.super_epochs(0.2, 0.25) == pytest.approx(0.45)
    assert limits.super_epochs(0.9, 0.25) == 1


def test_time():
    rate = limits.storage_rate([1000, 100], 1e5, iops=500, concurrency=8, latency=0.01)
    assert rate.tolist() == [100, 500]
    assert limits.storage_rate(1, np.inf, np.inf, 8, 0.01) == 800
    assert limits.storage_rate(1, 10, np.inf, 8, 0) == 10
    assert limits.stall_free_misses(100, [50, 400]).tolist() == [1, 0.25]
    # 1000 accesses: compute takes 2 s, storage m x 10 s, decoding 3 s on 1 core
    took = limits.epoch_seconds(1000, [0, 0.15, 0.5], 100, 500, 0.003, [4, 1, 4])
    assert took.tolist() == [2, 3, 5]
    took = limits.epoch_seconds_shared(1000, [0.1, 1], 100, 0.002, 0.004, 2)
    assert took.tolist() == [3, 10]


def test_training_does_not_wait_up_to_the_stall_free_misses():
    storage, compute = 120.0, 400.0
    m = limits.stall_free_misses(storage, compute)
    assert limits.epoch_seconds(100, m, storage, compute) == pytest.approx(100 / compute)
    assert limits.epoch_seconds(100, m * 1.1, storage, compute) > 100 / compute


def test_effective_sample_size():
    assert limits.ess([2, 2, 0, 0]) == 2
    assert limits.ess([1, 1, 1, 1]) == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda: limits.uniform(-0.1),
        lambda: limits.uniform(np.nan),
        lambda: limits.top_k([0, 0], 1),
        lambda: limits.lru_draws([[1]], 0.5),
        lambda: limits.belady_draws([1, -1], 1),
        lambda: limits.top_k([1], -1),
        lambda: limits.super_epoch_repeats(0.5),
        lambda: limits.storage_rate(0, 1, 1, 1, 1),
        lambda: limits.epoch_seconds(1, 1, 0, 1),
    ],
)
def test_what_has_no_meaning_is_refused(call):
    with pytest.raises(ConfigError, match=r"is out of range|is invalid"):
        call()

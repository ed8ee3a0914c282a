"""The production policies in replay, against closed forms, plain models and their own promises."""

import multiprocessing
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from stoker import recipes
from stoker.errors import ConfigError
from stoker.importance.baselines import LossHistory
from stoker.policy.baselines import LRU
from stoker.policy.score import Score
from stoker.recipes import Recipe
from stoker.recipes.base import Same, part
from stoker.sampler import WeightedSampler
from stoker.sim import Conditions, limits, replay
from stoker.sim.blank import Packages
from stoker.sim.job import Job
from stoker.sim.jobs import replay_jobs
from stoker.sim.replayed_cache import ReplayedCache
from stoker.sim.signals import MadeUpLosses

N, BATCH = 2000, 32
SHARES = [0.05, 0.2, 0.4, 0.6, 0.8]
ZIPF = 1 / np.arange(1, N + 1) ** 0.7
SIZES = np.maximum(1, np.random.default_rng(0).lognormal(11, 0.8, N)).astype(np.int64)
SIMULATED = sorted(set(recipes.names()) - {"spidercache"})


def weighted(policy):
    """Return i.i.d. draws in proportion to losses that never change."""
    return Recipe("weighted", "", policy, sampler=part(WeightedSampler), scorer=Same(LossHistory()))


def draws(epochs, seed=0):
    """Return epochs of eight draws a sample, so that nearly all are drawn in the first."""
    rng = np.random.default_rng(seed)
    return [rng.choice(N, 8 * N, p=ZIPF / ZIPF.sum()) for _ in range(epochs)]


@pytest.mark.parametrize("c", SHARES)
class TestAgainstClosedForms:
    @pytest.mark.parametrize("name", ["lru", "minio", "belady"])
    def test_shuffled_epochs(self, name, c):
        found = replay(name, N, 4, c, batch_size=BATCH).after(1)
        limit = recipes.get(name).predicted_hit_ratio(c)
        assert found.hit_ratio == pytest.approx(limit, abs=0.01)
        assert found.hit_ratio <= limits.uniform(c) + 1e-9

    def test_top_k_by_importance(self, c):
        found = replay(weighted(Score()), N, 8, c, losses=ZIPF, batch_size=BATCH).after(5)
        assert found.hit_ratio == pytest.approx(limits.top_k(ZIPF, c * N), abs=0.01)

    def test_che(self, c):
        found = replay("lru", N, 2, c, trace=draws(2), batch_size=BATCH).after(1)
        limit = limits.lru_draws(ZIPF, c * N)
        assert found.hit_ratio == pytest.approx(limit, abs=0.02)

    def test_belady_with_the_plan(self, c):
        found = replay("belady", N, 2, c, trace=draws(3), batch_size=BATCH // 2).after(1)
        limit = limits.belady_draws(ZIPF, c * N)
        assert found.hit_ratio == pytest.approx(limit, abs=0.02)

    def test_shade_as_its_code_repeats(self, c):
        repetition = 2.0
        recipe = replace(
            recipes.shade(repetition=repetition, important=c), scorer=Same(LossHistory())
        )
        losses = 1 + np.log(np.arange(1, N + 1))
        found = replay(recipe, N, 8, c, losses=losses, batch_size=BATCH).after(5)
        limit = limits.shade(losses, c * N, repetition)
        assert found.hit_ratio == pytest.approx(limit, abs=0.015)


def test_lru_hits_just_what_a_plain_lru_does():
    trace = [ids[:1000] for ids in draws(2)]
    found = replay("lru", N, 2, 0.1, trace=trace, batch_size=1)
    cached, hits = OrderedDict(), 0
    for i in np.concatenate(trace).tolist():
        hits += i in cached
        cached[i] = None
        cached.move_to_end(i)
        if len(cached) > 0.1 * N:
            cached.popitem(last=False)
    assert sum(epoch.hits for epoch in found.per_epoch) == hits


@pytest.mark.parametrize("name", SIMULATED)
class TestEveryRecipe:
    def test_counts_add_up_and_repeat(self, name):
        found, again = (replay(name, 600, 7, 0.4, sizes=SIZES[:600]) for _ in range(2))
        assert found == again
        for epoch in found.per_epoch:
            ended = epoch.hits + epoch.substituted + epoch.fetched + epoch.packaged
            assert ended == epoch.accesses > 0
            assert 0 < epoch.coverage <= 1
            assert epoch.hit_bytes <= epoch.served_bytes
        assert found.per_epoch[0].hits == 0 or name == "oracle"


def test_another_seed_is_another_replay():
    one, two = (replay("random", 500, 3, 0.3, seed=seed) for seed in (0, 1))
    assert one != two


@pytest.mark.parametrize(
    "recipe", ["quiver", recipes.icache(warm_up=1), recipes.impact(max_warm_up=2)]
)
def test_substitution_serves_no_sample_twice(recipe):
    found = replay(recipe, 1000, 6, 0.3, batch_size=BATCH)
    assert found.substituted_ratio > 0.05
    for epoch in found.per_epoch:
        # Each sample once at most: as many different ones as accesses.
        assert epoch.coverage * 1000 == pytest.approx(epoch.accesses)


@pytest.mark.parametrize("cache", [0.05, 0.4])
@pytest.mark.parametrize("batch", [7, 128])
@pytest.mark.parametrize(
    "name",
    [
        "quiver",
        "icache:warm_up=2",
        "icache:warm_up=1:split=moving",
        "icache:warm_up=2:package_bytes=400_000",
        "impact:evaluation=history:warm_up=1",
    ],
)
def test_runs_with_substitutes_are_as_batch_after_batch(name, batch, cache, monkeypatch):
    sizes = np.random.default_rng(4).integers(1_000, 200_000, 1500)
    found = replay(name, 1500, 6, cache, sizes, batch_size=batch, seed=5)
    monkeypatch.setattr(ReplayedCache, "swaps_runs", False)
    assert replay(name, 1500, 6, cache, sizes, batch_size=batch, seed=5) == found
    assert sum(epoch.substituted for epoch in found.per_epoch) > 0


@pytest.mark.parametrize("name", ["quiver", "icache:warm_up=1", "shade"])
def test_made_up_losses_are_as_if_they_were_given(name):
    made, every = MadeUpLosses(1500, seed=5), np.arange(1500, dtype=np.uint32)
    table = np.stack([made(every, epoch) for epoch in range(6)])
    assert replay(name, 1500, 6, 0.3, losses=table, seed=5) == replay(name, 1500, 6, 0.3, seed=5)


@pytest.mark.parametrize(
    "name", ["icache:warm_up=2", "impact:max_warm_up=2", "icache:substitute=high"]
)
def test_packages_lose_nothing_by_waiting_until_there_may_be_room(name, monkeypatch):
    sizes = np.random.default_rng(3).integers(1_000, 200_000, 1500)
    found = replay(name, 1500, 7, 0.3, sizes, batch_size=40)
    monkeypatch.setattr(Packages, "lacking", 0)  # looked for after every batch
    assert replay(name, 1500, 7, 0.3, sizes, batch_size=40) == found
    assert sum(epoch.packaged for epoch in found.per_epoch) > 0


def test_packages_are_read_and_serve():
    late = replay("icache:warm_up=2", 1500, 5, 0.3).after(3)
    assert late.packaged_ratio > 0
    assert sum(epoch.package_reads for epoch in late.per_epoch) > 0
    assert all(epoch.package_reads == 0 for epoch in replay("lru", 500, 2, 0.3).per_epoch)


def test_unequal_sizes():
    plain = replay("belady", N, 3, 0.2, sizes=SIZES, batch_size=BATCH).after(1)
    assert plain.byte_hit_ratio == pytest.approx(0.2, abs=0.01)
    small = replay("belady:request_bytes=1e9", N, 3, 0.2, sizes=SIZES, batch_size=BATCH).after(1)
    best = limits.smallest_first(SIZES, 0.2 * SIZES.sum())
    assert plain.hit_ratio + 0.1 < small.hit_ratio <= best + 0.01
    assert small.byte_hit_ratio <= 0.21


def test_a_cache_of_nothing_and_of_everything():
    assert replay("lru", 500, 3, 0.0).hit_ratio == 0
    assert replay("lru", 500, 3, 1.0).after(1).hit_ratio == 1
    assert replay("oracle", 500, 1, 0.1).hit_ratio == 1


def test_a_size_means_the_same_in_every_form():
    total = int(SIZES.sum())
    forms = (0.25, "25%", total // 4)
    found = [replay("minio", N, 2, cache, sizes=SIZES).per_epoch for cache in forms]
    assert found[0] == found[1] == found[2]


def test_what_was_drawn_is_reported():
    found = replay(weighted(LRU()), N, 3, 0.2, losses=ZIPF)
    assert found.per_epoch[0].ess == found.per_epoch[0].coverage == 1
    expected = np.mean(1 - np.exp(-N * ZIPF / ZIPF.sum()))
    assert found.after(1).coverage == pytest.approx(expected, abs=0.02)
    assert found.after(1).ess < 0.6


def test_losses_may_change_by_epoch_or_come_from_a_function():
    table = np.stack([ZIPF, ZIPF[::-1], ZIPF])
    given = replay(weighted(Score()), N, 3, 0.2, losses=table)
    called = replay(weighted(Score()), N, 3, 0.2, losses=lambda ids, epoch: table[epoch, ids])
    assert given == called != replay(weighted(Score()), N, 3, 0.2, losses=ZIPF)


def test_progress_is_told():
    told = []
    replay("lru", 200, 3, 0.2, progress=lambda: told.append(1))
    assert len(told) == 3


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"cache": 1.5}, "share"),
        ({"cache": float("nan")}, "share"),
        ({"cache": "many"}, "not a size"),
        ({"sizes": [1, 2]}, "sizes"),
        ({"sizes": np.zeros(100, np.int64)}, "sizes"),
        ({"losses": [1.0]}, "losses"),
        ({"losses": np.full(100, -1.0)}, "losses"),
        ({"trace": [[0]]}, "1 epochs"),
        ({"trace": [[0], [100]]}, "100"),
        ({"trace": [[0.5], [1]]}, "trace"),
        ({"recipe": "spidercache"}, "embeddings"),
        ({"recipe": "nothing"}, "nothing"),
        ({"recipe": "lru:beta=2"}, "beta"),
        ({"recipe": recipes.icache(package_bytes=1 << 28)}, "package"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        replay(**{"recipe": "lru", "num_samples": 100, "epochs": 2, "cache": 0.5, **changes})


@pytest.mark.parametrize(("repeat", "least"), [(2, 0.55), (4, 0.75), (8, 0.86)])
def test_foresight_hits_beyond_the_cache_where_samples_repeat(repeat, least):
    recipe = recipes.foresight(repeat=repeat, annealed=0.0)
    found = replay(recipe, N, 3 * repeat, 0.2, batch_size=BATCH).after(repeat)
    coverage = np.mean([epoch.coverage for epoch in found.per_epoch])
    assert least < found.hit_ratio <= limits.super_epochs(0.2, 1 - coverage)


@pytest.mark.parametrize("name", ["icache", "quiver", "foresight"])
def test_the_same_in_any_process(name):
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as pool, spawn.Pool(1) as other:
        first, second = (one.apply_async(replay, (name, N, 5, 0.2)) for one in (pool, other))
        assert first.get(60) == second.get(60)


def test_s14_ties_favour_no_class():
    """All losses are the same, and classes of 100 lie one after the other."""
    recipe = recipes.get("shade")
    with ReplayedCache(recipe, np.full(1000, 10), 0.5, 0) as cache:
        job = Job(recipe, cache, lambda ids, _: ids * 0.0, 3, 50, 0)
        for _ in range(3):
            job.run()
        held = cache._arena.list("main")
    assert len(held) == 500
    assert np.abs(np.bincount(held // 100, minlength=10) - 50).max() <= 5


def test_samples_that_are_cached_smaller_hit_as_in_a_larger_cache():
    small = replay("minio", N, 4, 0.2, cached=0.4)
    assert small.cache_share == 0.2
    large = replay("minio", N, 4, 0.5, cached=1.0)
    assert [e.hits for e in small.per_epoch] == [e.hits for e in large.per_epoch]
    assert small.after(1).hit_ratio == pytest.approx(0.5, abs=0.01)
    assert replay("minio", N, 3, 0.5, cached=0.2).after(1).hit_ratio == 1


def test_sizes_of_cached_samples_may_be_given_one_by_one():
    cached = np.where(np.arange(N) % 2, 1000, 110_000)
    found = replay("minio", N, 4, 0.2, cached=cached).after(1)
    assert 0.36 < found.hit_ratio < 0.5  # nearly as many of the large ones as of the small ones
    jobs = replay_jobs(["minio"], N, 4, 0.2, cached=cached, seeds=[0])
    assert jobs.together.after(1).hit_ratio == pytest.approx(found.hit_ratio, abs=0.01)


def test_what_is_read_is_not_smaller():
    link = Conditions(1e9, latency=0, tail=0, bandwidth=1e6)
    for cached in (None, 0.1):
        found = replay("minio", N, 1, 0.2, sizes=np.full(N, 1000), cached=cached, conditions=link)
        assert found.seconds == pytest.approx(N * 1000 / 1e6, rel=0.05)


@pytest.mark.parametrize("cached", [0, -1.0, float("nan"), [1, 2]])
def test_cached_sizes_that_make_no_sense_are_refused(cached):
    with pytest.raises(ConfigError):
        replay("minio", N, 2, 0.2, cached=cached)

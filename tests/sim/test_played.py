"""Recorded trainings played back: the same hits in the simulator and in a bare Loader."""

import math

import numpy as np
import pytest
import torch

import stoker
from stoker import recipes
from stoker.errors import ConfigError
from stoker.importance.base import Observation
from stoker.scores import Scores
from stoker.sim import Conditions, Trace, replay
from stoker.sim.played import PlayedSampler, Player, RecordedLosses, Visits, played
from stoker.source.held import MemorySource

# Validation is beside the point here.
pytestmark = pytest.mark.filterwarnings("ignore:the recipe goes by validation accuracy")

N, EPOCHS, BATCH, SHARE = 800, 5, 16, 0.3
SIZES = np.random.default_rng(0).integers(40, 200, N)
LOSSES = np.random.default_rng(1).lognormal(0, 1, (EPOCHS, N))
VECTORS = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))


def trained(recipe, trace=None, show=True, rescore=None):
    """Return hits and substitutes of a training, as shares of its accesses."""
    samples = MemorySource([bytes(int(size)) for size in SIZES])
    loader = stoker.Loader(
        stoker.SampleDataset(samples, decode=len),
        batch_size=BATCH,
        cache=stoker.Cache(f"{SHARE:.0%}", prefetch=0),
        recipe=recipe,
        epochs=EPOCHS,
        return_meta=True,
        rescore=rescore,
        trace=trace,
    )
    with loader:
        for epoch in range(EPOCHS):
            for _, meta in loader:
                losses = torch.as_tensor(LOSSES[epoch, meta.ids])
                ids = torch.as_tensor(meta.ids.astype(np.int64))
                more = {"embeddings": VECTORS[ids], "labels": ids % 3} if show else {}
                loader.observe(losses, meta=meta, **more)
        stats = loader.stats
    return np.array([stats.hits, stats.substituted]) / stats.accesses


def scored_anew(batch):
    return torch.full((len(batch),), 2.0)


@pytest.mark.parametrize("name", ["lru", "shade", "icache", "impact", "spidercache"])
def test_a_trace_hits_in_the_simulator_what_the_recorded_run_did(tmp_path, name):
    if name == "spidercache":
        pytest.importorskip("faiss")
    params = {"icache": {"warm_up": 1, "package_bytes": 500}, "impact": {"package_bytes": 500}}
    recipe = getattr(recipes, name)(**params.get(name, {}))
    hits, substituted = trained(
        recipe, tmp_path / "t", rescore=scored_anew if name == "impact" else None
    )
    found = replay(recipe, N, EPOCHS, SHARE, trace=tmp_path / "t")
    # Packages, and scores of the graph, come in a time of their own in the real one.
    slack = 0.015 if name in ("lru", "shade") else 0.03
    assert found.hit_ratio == pytest.approx(hits, abs=slack)
    served = found.hit_ratio + found.substituted_ratio + found.packaged_ratio
    if name in ("icache", "impact"):
        assert served >= hits + substituted - slack
    else:
        assert served == pytest.approx(hits + substituted, abs=slack)


def test_a_loader_without_a_model_does_what_the_recorded_one_did(tmp_path):
    expected = trained("shade", tmp_path / "t")
    with Trace(tmp_path / "t") as trace:
        again = trained(played(recipes.get("shade"), trace), show=False)
        other = trained(played(recipes.get("lru"), trace), show=False)
    assert again.tolist() == expected.tolist()
    assert other[0] < expected[0]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t"
    trained("lru", path)
    with Trace(path) as opened:
        yield opened


def test_any_cache_replays_it(trace):
    accesses = [epoch.asked for epoch in trace]
    for name in ("minio", "belady", "sieve"):
        plain = replay(name, N, EPOCHS, SHARE, sizes=SIZES, trace=accesses, batch_size=BATCH)
        assert replay(name, N, EPOCHS, SHARE, trace=trace) == plain
    assert replay("minio", N, EPOCHS, SHARE, trace=trace).after(1).hit_ratio > 0.25


def test_recorded_losses_are_those_of_the_epoch(trace):
    losses, ids = RecordedLosses(trace), np.arange(N, dtype=np.uint32)
    for epoch in (0, 3, 1):
        assert losses(ids, epoch).tolist() == LOSSES[epoch].tolist()
    assert losses(ids, 99).tolist() == LOSSES[-1].tolist()
    by_score = replay("shade", N, EPOCHS, SHARE, losses=losses, sizes=SIZES, batch_size=BATCH)
    given = replay("shade", N, EPOCHS, SHARE, losses=LOSSES, sizes=SIZES, batch_size=BATCH)
    assert by_score == given


@pytest.mark.parametrize("batch", [1, BATCH, 50, N])
def test_scores_come_as_they_had_come_whatever_the_batches(trace, batch):
    player, scores = Player(trace), Scores(N)
    sampler = PlayedSampler(trace)
    assert sampler.longest == N
    for epoch in range(2):
        player.begin_epoch(scores, epoch)
        ids = sampler.plan(None, epoch).ids
        for start in range(0, N, batch):
            part = ids[start : start + batch]
            player.update(scores, Observation(part, start, epoch, losses=np.zeros(len(part))))
            done = ids[: (start + len(part)) // BATCH * BATCH]
            assert scores.values[done].tolist() == LOSSES[epoch, done].tolist()
        assert scores.values.tolist() == LOSSES[epoch].tolist()


def test_plans_follow_each_other(trace):
    visits = Visits(trace)
    second = visits.plan(1)
    assert second.start == N
    assert second.following.ids.tolist() == visits.plan(2).ids.tolist()
    assert visits.plan(EPOCHS - 1).following is None
    assert visits.plan(0).start == 0


def test_time_is_told_where_conditions_are_given(trace):
    given = Conditions(compute_rate=1000.0, latency=0.0, iops=500.0, workers=2)
    found = replay("minio", N, EPOCHS, SHARE, trace=trace, conditions=given)
    for epoch in found.per_epoch:
        assert epoch.time.seconds >= max(N / 1000, epoch.fetched / 500) * 0.99
    assert found.seconds == pytest.approx(sum(epoch.time.seconds for epoch in found.per_epoch))
    assert found.utilisation == pytest.approx(EPOCHS * N / 1000 / found.seconds)
    assert math.isnan(replay("minio", N, 1, SHARE, trace=trace).seconds)


def test_what_makes_no_sense_is_refused(trace, tmp_path):
    with pytest.raises(ConfigError, match="800 samples"):
        replay("lru", N + 1, 1, SHARE, trace=trace)
    with pytest.raises(ConfigError, match="5 epochs and 6"):
        replay("lru", N, 6, SHARE, trace=trace)
    with stoker.Loader(
        stoker.SampleDataset(MemorySource([b"x"] * 4), decode=len), cache=0, trace=tmp_path / "t"
    ) as loader:
        list(loader)
    with Trace(tmp_path / "t") as silent, pytest.raises(ConfigError, match="no losses"):
        replay("shade", 4, 1, 0.5, trace=silent)

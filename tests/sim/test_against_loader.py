"""Replays against real runs of the Loader: the same recipe must hit the same."""

import numpy as np
import pytest
import torch

import stoker
from stoker import recipes
from stoker.sim import SimResult, replay
from stoker.source.held import MemorySource

N, EPOCHS, BATCH, SHARE = 1200, 6, 16, 0.3
SIZES = np.random.default_rng(0).integers(40, 200, N)
LOSSES = np.random.default_rng(1).lognormal(0, 1, N)


def trained(recipe):
    """Return hits, substitutes and accesses of a training with these losses."""
    samples = MemorySource([bytes(int(size)) for size in SIZES])
    dataset = stoker.SampleDataset(samples, decode=len)
    loader = stoker.Loader(
        dataset,
        batch_size=BATCH,
        cache=stoker.Cache(f"{SHARE:.0%}", prefetch=0),
        recipe=recipe,
        epochs=EPOCHS,
        return_meta=True,
    )
    for _ in range(EPOCHS):
        for _, meta in loader:
            loader.observe(torch.as_tensor(LOSSES[meta.ids]), meta=meta)
    stats = loader.stats
    counts = np.array([stats.hits, stats.substituted, stats.accesses])
    loader.close()
    return counts


def simulated(recipe) -> SimResult:
    return replay(recipe, N, EPOCHS, SHARE, sizes=SIZES, losses=LOSSES, batch_size=BATCH)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("lru", {}),
        ("minio", {}),
        ("s3fifo", {}),
        ("belady", {}),
        ("foresight", {"repeat": 2, "annealed": 0.3}),
        ("foresight", {"repeat": 4, "static": 0.5, "annealed": 0.0}),
        ("shade", {"repetition": 2.0}),
        ("quiver", {}),
    ],
)
def test_the_simulator_hits_what_the_loader_does(name, params):
    recipe = getattr(recipes, name)(**params)
    hits, substituted, accesses = trained(recipe)
    found = simulated(recipe)
    assert sum(epoch.accesses for epoch in found.per_epoch) == accesses
    assert found.hit_ratio == pytest.approx(hits / accesses, abs=0.015)
    assert found.substituted_ratio == pytest.approx(substituted / accesses, abs=0.015)


@pytest.mark.parametrize("name", ["foresight", "belady", "lru"])
def test_a_mixture_is_simulated_as_it_is_loaded(name):
    """With weights that change by step, so that the cache is divided again."""
    weights = stoker.Stages({0: {"a": 3, "b": 1}, 150: {"a": 1, "b": 3}}, BATCH)
    parts, sizes = {}, {"a": SIZES[:900], "b": SIZES[900:]}
    for part, lengths in sizes.items():
        parts[part] = stoker.SampleDataset(
            MemorySource([part.encode() * int(size) for size in lengths]), decode=len
        )
    data = stoker.mix(parts, weights, epoch_samples=800)
    cache = stoker.Cache(f"{SHARE:.0%}", prefetch=0)
    with stoker.Loader(data, BATCH, cache=cache, recipe=name, epochs=EPOCHS) as loader:
        for _ in range(EPOCHS):
            list(loader)
        hits = [epoch.hits for epoch in loader.epoch_stats]
        by_part = loader.source_stats
    recipe = recipes.mixed(recipes.get(name), data.mixture)
    found = replay(recipe, N, EPOCHS, SHARE, sizes=SIZES, batch_size=BATCH)
    simulated = [epoch.hits for epoch in found.per_epoch]
    np.testing.assert_allclose(hits, simulated, atol=0.015 * 800)
    assert sum(stats.hits for stats in by_part.values()) == sum(hits)
    if name == "foresight":
        assert by_part["b"].hit_ratio > by_part["a"].hit_ratio, "its passes are shorter"

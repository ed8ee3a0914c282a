"""Replays against real runs of the Loader: the same recipe must hit the same."""

import numpy as np
import pytest
import torch

import stoker
from stoker import recipes
from stoker.sim import SimResult, replay
from stoker.source.in_memory import MemorySource

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

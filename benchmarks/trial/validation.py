"""The virtual clock of the trial held against real time: real storage limits, workers, prefetch.

The same made-up losses go to both, and a step of training is a sleep of its length.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import stoker
from stoker import recipes
from stoker.source.held import MemorySource
from trial.contestants import CACHE
from trial.train import Stage, VirtualClock

VALIDATED = ("lru", "minio", "quiver", "shade", "foresight:repeat=4", "foresight:repeat=8")
"""Recipes, with parameters."""
SAMPLES, EPOCHS, WORKERS = 2_000, 6, 2


def validated(stage: Stage, name: str) -> dict[str, Any]:
    """Return seconds and hits from the second epoch on, in real and in virtual time."""
    ids = np.linspace(0, len(stage.images) - 1, min(SAMPLES, len(stage.images))).astype(np.int64)
    source = MemorySource(stage.images.source.read(np.unique(ids)))
    losses = torch.from_numpy(np.random.default_rng(1).lognormal(0, 1, len(source)))
    slow = stage.storage.slow(source)
    real_s, real_hits = _real(stage, name, slow, losses)
    virtual_s, virtual_hits = _virtual(stage, name, source, losses)
    return {
        "recipe": name,
        "real_s": real_s,
        "virtual_s": virtual_s,
        "real_hits": real_hits,
        "virtual_hits": virtual_hits,
    }


def _loader(source: Any, name: str, batch_size: int, **others: Any) -> stoker.Loader:
    return stoker.Loader(
        stoker.SampleDataset(source, len),
        batch_size=batch_size,
        collate_fn=len,
        recipe=recipes.get(name),
        epochs=EPOCHS,
        return_meta=False,
        **others,
    )


def _real(stage: Stage, name: str, source: Any, losses: torch.Tensor) -> tuple[float, float]:
    loader = _loader(
        source,
        name,
        stage.batch_size,
        num_workers=WORKERS,
        persistent_workers=True,
        cache=f"{CACHE:.0%}",
    )
    seconds = []
    with loader:
        for _ in range(EPOCHS):
            due = began = time.perf_counter()
            for size in loader:
                # To when the step would be over, as sleeps are late by a little.
                due = max(due, time.perf_counter()) + size / stage.storage.compute
                loader.observe(losses[loader.last_ids])
                time.sleep(max(0.0, due - time.perf_counter()))
            seconds.append(time.perf_counter() - began)
        return sum(seconds[1:]) / (EPOCHS - 1), loader.stats.hit_ratio


def _virtual(stage: Stage, name: str, source: Any, losses: torch.Tensor) -> tuple[float, float]:
    loader = _loader(source, name, stage.batch_size, cache=stoker.Cache(f"{CACHE:.0%}", prefetch=0))
    seconds = []
    with loader:
        clock = VirtualClock(stage, source.sizes, loader, recipes.get(name), name != "shade")
        for _ in range(EPOCHS):
            for _ in loader:
                loader.observe(losses[loader.last_ids])
                clock.batch()
            loader.end_epoch()
            seconds.append(clock.end_epoch()["seconds"])
        return sum(seconds[1:]) / (EPOCHS - 1), loader.stats.hit_ratio

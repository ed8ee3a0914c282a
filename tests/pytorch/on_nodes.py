"""A small training for ranks on several nodes, and what one node would do."""

from __future__ import annotations

from typing import Any

from support.caches import gathered
from support.parts import number_of, numbers

from stoker.pytorch import Loader, SampleDataset
from stoker.testing.sources import SlowSource

N, BATCH = 604, 25  # of which icache selects an even number, so that none is repeated


def loader_of(**arguments: Any) -> Loader:
    dataset = SampleDataset(SlowSource(numbers(N), latency=0.0), number_of)
    options: dict[str, Any] = {"batch_size": BATCH, "cache": "20%", "prefetch": 0, "seed": 3}
    return Loader(dataset, return_meta=True, **gathered({**options, **arguments}))


def cached_in(loader: Loader) -> list[int]:
    """The samples that the cache of this node has, outside of the window."""
    arena = loader.cache.store.tier.arena  # type: ignore[union-attr]
    regions = [name for name in arena.stats()["regions"] if name != "window"]
    return sorted(int(i) for name in regions for i in arena.list(name))


def alone(epochs: int = 3, **arguments: Any) -> list[list[list[int]]]:
    """The batches of a run of one rank whose batch is a step of all ranks."""
    with loader_of(cache=0, batch_size=2 * BATCH, **arguments) as loader:
        return [[batch.tolist() for batch, _ in loader] for _ in range(epochs)]

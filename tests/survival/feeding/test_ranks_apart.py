"""One rank far ahead of the other, with a window of a few samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.waiting import await_true

from stoker import Cache
from stoker.pytorch import Loader, SampleDataset
from stoker.source.held import MemorySource
from stoker.testing.sources import SlowSource

from .samples import number_of, sample, served

NUM = 320
BATCH = 8
PATIENCE = 60.0  # seconds after which the fast rank counts as stuck


def train(rank: int, place: Path, recipe: str) -> dict[str, Any]:
    """Go through two epochs; rank 1 goes on from its first batch once rank 0 has had its last."""
    samples = MemorySource([sample(number) for number in range(NUM)])
    with Loader(
        SampleDataset(SlowSource(samples, latency=0.002), number_of),
        BATCH,
        cache=Cache("20%", prefetch=2000),
        recipe=recipe,
        num_workers=1,
        multiprocessing_context="fork",
        return_meta=True,
    ) as loader:
        epochs = []
        for epoch in range(2):
            through = place / f"through-{epoch}"
            seen = []
            for step, batch in enumerate(loader):
                seen += served(batch)
                if rank == 1 and step == 0:
                    await_file(through)
            epochs.append(seen)
            through.touch()
        return {"epochs": epochs, "accesses": loader.stats.accesses}


def await_file(path: Path) -> None:
    assert await_true(path.exists, PATIENCE), "rank 0 waits for rank 1, which waits for it"


@pytest.mark.parametrize("recipe", ["minio", "lru"])
def test_the_fast_rank_does_not_wait_for_the_slow_one(tmp_path: Path, recipe: str) -> None:
    fast, slow = run_ranks(2, tmp_path, train, tmp_path, recipe)
    for epoch in range(2):
        assert sorted(fast["epochs"][epoch] + slow["epochs"][epoch]) == list(range(NUM))
    assert fast["accesses"] == slow["accesses"] == NUM

"""One rank far ahead of the other, with a window of a few samples."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pytorch.ranks import run_ranks

from stoker.pytorch import Loader, SampleDataset
from stoker.source.memory import MemorySource
from stoker.testing.slow_source import SlowSource

from .samples import number_of, sample, served

NUM = 320
BATCH = 8
STEP = 0.2  # seconds that rank 1 computes


def train(rank: int, recipe: str) -> dict[str, Any]:
    samples = MemorySource([sample(number) for number in range(NUM)])
    with Loader(
        SampleDataset(SlowSource(samples, latency=0.002), number_of),
        BATCH,
        cache="20%",
        recipe=recipe,
        num_workers=1,
        multiprocessing_context="fork",
        prefetch_bytes=2000,
        return_meta=True,
    ) as loader:
        epochs, seconds = [], []
        for _ in range(2):
            seen = []
            for step, batch in enumerate(loader):
                if step == 0:
                    begin = time.monotonic()  # the workers are there
                seen += served(batch)
                time.sleep(STEP * rank)
            epochs.append(seen)
            seconds.append(time.monotonic() - begin)
        return {"epochs": epochs, "seconds": seconds, "accesses": loader.stats.accesses}


@pytest.mark.parametrize("recipe", ["minio", "lru"])
def test_the_fast_rank_does_not_wait_for_the_slow_one(tmp_path: Path, recipe: str) -> None:
    fast, slow = run_ranks(2, tmp_path, train, recipe)
    for epoch in range(2):
        assert sorted(fast["epochs"][epoch] + slow["epochs"][epoch]) == list(range(NUM))
    assert fast["accesses"] == slow["accesses"] == NUM
    print(f"{recipe}: fast {fast['seconds']}, slow {slow['seconds']}")
    assert sum(fast["seconds"]) < 0.5 * sum(slow["seconds"])

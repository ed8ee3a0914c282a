"""Two jobs that train on one data set at the same time, each in an order of its own."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from support.processes import warm

from stoker.pytorch import Loader, SampleDataset
from stoker.source.held import MemorySource

from .processes import prefetchers
from .samples import number_of, sample, walk
from .watched_source import WatchedSource

NUM = 300
EPOCHS = 3


def train(source: WatchedSource, seed: int, recipe: str, ready: Any, answers: Any) -> None:
    try:
        with Loader(
            SampleDataset(source, number_of),
            10,
            cache="30%",
            recipe=recipe,
            num_workers=1,
            multiprocessing_context="fork",
            seed=seed,
            epochs=EPOCHS,
            return_meta=True,
        ) as loader:
            ready.wait(240)
            for _ in range(EPOCHS):
                assert walk(loader) == list(range(NUM))
            ready.wait(240)  # both are done, and what was read ahead was counted
            stats = loader.stats
            answers.put((stats.fetched, stats.accesses, len(prefetchers())))
    except BaseException:
        answers.put(traceback.format_exc())
        raise


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["minio", "lru"])
def test_they_read_together(recipe: str) -> None:
    samples = MemorySource([sample(number) for number in range(NUM)])
    source = WatchedSource(samples, latency=0.005)
    ready, answers = warm.Barrier(2), warm.Queue()
    jobs = [
        warm.Process(target=train, args=(source, seed, recipe, ready, answers)) for seed in (1, 2)
    ]
    for job in jobs:
        job.start()
    try:
        results = [answers.get(timeout=240) for _ in jobs]
        for result in results:
            assert not isinstance(result, str), result
        for job in jobs:
            job.join(60)
            assert job.exitcode == 0
    finally:
        for job in jobs:
            job.kill()
    fetched = sum(result[0] for result in results)
    reads = int(source.reads.sum())
    print(f"{recipe}: {reads} reads, {fetched} of {2 * EPOCHS * NUM} accesses missed")
    assert sum(result[1] for result in results) >= 2 * EPOCHS * NUM
    assert source.read_twice_at_once == []
    assert reads == fetched
    assert max(result[2] for result in results) == 1  # they share the prefetch process

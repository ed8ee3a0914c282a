"""Workers of every start method, with the prefetch process and the disk tier on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker import Cache
from stoker.pytorch import Loader, SampleDataset
from stoker.source.held import MemorySource
from stoker.testing.sources import SlowSource

from .processes import wait_for_prefetcher
from .samples import number_of, sample, walk

NUM = 160


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_workers_read_what_was_prefetched_to_disk(tmp_path: Path, method: str) -> None:
    samples = MemorySource([sample(number) for number in range(NUM)])
    source = SlowSource(samples, latency=0.002)
    options: Any = {"cache": Cache("30%", disk=tmp_path / "disk"), "return_meta": True}
    with Loader(
        SampleDataset(source, number_of),
        8,
        num_workers=1 if method == "spawn" else 2,
        multiprocessing_context=method,
        persistent_workers=True,
        epochs=3,
        **options,
    ) as loader:
        assert walk(loader) == list(range(NUM))
        wait_for_prefetcher()
        for _ in range(2):
            assert walk(loader) == list(range(NUM))
        stats = loader.stats
        assert stats.accesses == 3 * NUM == stats.hits + stats.fetched
        assert stats.disk_hits > 0
        assert stats.disk_errors == 0
    assert source.reads.tolist() == [1] * NUM
    with Loader(SampleDataset(source, number_of), 8, **options) as loader:
        assert walk(loader) == list(range(NUM))
    assert source.reads.tolist() == [1] * NUM  # a warm start

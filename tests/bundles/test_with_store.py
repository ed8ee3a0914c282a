"""Training's view: a store that substitutes, over a cache that packages fill."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bundles_bench import MIN_BYTES, NUM, SAMPLES, H, L, two_regions
from support.waiting import await_true, train_step

from stoker.bundles import Packager, Packaging
from stoker.policy.base import Substitution
from stoker.shared import SharedArray
from stoker.source.held import MemorySource
from stoker.store.arena import Arena
from stoker.store.memory_tier import MemoryTier
from stoker.store.store import Store
from stoker.testing.sources import SlowSource
from stoker.types import Outcome

LOW = np.arange(NUM) % 4 != 0
WORKERS = 4


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with two_regions(8 * MIN_BYTES) as arena:
        yield arena


def work(store: Store, ids: np.ndarray, served: SharedArray, outcomes: SharedArray) -> None:
    """Ask for ``ids``, and note what came of each."""
    for at in range(0, len(ids), 4):
        batch = ids[at : at + 4]
        found = store.serve(batch)
        for place, asked in enumerate(batch.tolist()):
            assert found[place].tobytes() == SAMPLES[int(found.ids[place])]
            served.array[asked] = found.ids[place]
            outcomes.array[asked] = found.outcomes[place]
        train_step(0.005)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_no_sample_twice_and_few_reads(arena: Arena) -> None:
    """Half of the low samples are asked for, by several workers, while packages come and go."""
    source = SlowSource(MemorySource(SAMPLES), latency=0.0005)
    places = SharedArray.copy_of(np.where(LOW, L, H).astype(np.uint8))
    packaged = SharedArray.create(NUM, np.uint8)
    store = Store(
        source,
        MemoryTier(arena, "H"),
        places=places,
        substitution=Substitution("low_by_low", "L"),
        packaged=packaged,
    )
    assert store.claims is not None
    marks = store.claims.served
    packager = Packager(source, arena, marks, Packaging(MIN_BYTES), low=L, packaged=packaged)
    fork = multiprocessing.get_context("fork")
    try:
        for epoch in range(3):
            rng = np.random.default_rng(epoch)
            asked = rng.permutation(NUM)[: NUM // 2].astype(np.uint32)
            store.begin_epoch(epoch)
            packager.begin_epoch(epoch, store.stamp, places, np.empty(0, np.uint32))
            await_true(lambda: packager.stats()["package_reads"] >= 6, 20)
            served = SharedArray.copy_of(np.full(NUM, -1))
            outcomes = SharedArray.copy_of(np.full(NUM, -1))
            workers = [
                fork.Process(target=work, args=(store, asked[n::WORKERS], served, outcomes))
                for n in range(WORKERS)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(60)
                assert worker.exitcode == 0
            came = served.array[asked]
            assert len(np.unique(came)) == len(asked)
            assert np.array_equal(LOW[came], LOW[asked])  # low by low, high by itself
            assert np.array_equal(came[~LOW[asked]], asked[~LOW[asked]])
            low_outcomes = outcomes.array[asked][LOW[asked]]
            without_read = np.isin(low_outcomes, [Outcome.PACKAGED, Outcome.SUBSTITUTED])
            assert without_read.mean() > 0.5
        stats = store.stats()
        assert stats["packaged"] > 0
        assert stats["substituted"] > 0
        accounted = stats["hits"] + stats["substituted"] + stats["packaged"] + stats["fetched"]
        assert stats["accesses"] == accounted
        # Every read was a worker's miss, or one for a package.
        counted = stats["fetched"] + packager.stats()["rebuild_reads"]
        assert source.reads.sum() == counted
        arena.verify()
    finally:
        packager.close()
        store.close()

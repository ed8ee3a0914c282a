"""Standing aside with several ranks, and with several jobs at one cache: each decides alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.processes import processes_of
from support.ranks import run_ranks
from support.waiting import until
from torch import distributed

from stoker import Cache
from stoker.epoch import read_ahead
from stoker.pytorch import Loader, SampleDataset
from stoker.source.files import FileSource

NUM, BATCH = 240, 8
EPOCHS = 3


class Told(FileSource):
    """Files that are in the page cache as far as a test says so, for each source."""

    share = 1.0

    def at_hand(self, ids: NDArray[np.uint32]) -> float:
        return self.share


def dataset(root: Path, share: float) -> SampleDataset:
    source = Told([root / f"{number:03d}.bin" for number in range(NUM)])
    source.share = share
    return SampleDataset(source, number_in)


def number_in(data: bytes) -> int:
    return int.from_bytes(data[:4], "little")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that hold their numbers."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(NUM):
        (folder / f"{number:03d}.bin").write_bytes(number.to_bytes(4, "little") * 10)
    return folder


# --- ranks ---


def train(rank: int, root: Path, shares: list[list[float]], workers: int, recipe: str) -> Any:
    """Read the epochs; ``shares[rank]`` says what is at hand as each begins."""
    samples = dataset(root, 1.0)
    seen = []
    with Loader(
        samples,
        BATCH,
        num_workers=workers,
        cache="50%",
        recipe=recipe,
        epochs=EPOCHS,
        return_meta=True,
        # These ranks are spawned, and would spawn their workers.
        multiprocessing_context="fork" if workers else None,
    ) as loader:
        for share in shares[rank]:
            samples.source.share = share  # type: ignore[attr-defined]
            found = []
            for batch, meta in loader:
                found += batch.tolist()
                loader.observe(torch.ones(len(batch)), meta=meta)
            seen.append(found)
        runtime = Path(os.environ["STOKER_RUNTIME_DIR"])
        counts: list[int] = []

        def is_as_expected() -> bool:
            counts.append(len(processes_of("stoker.prefetch.process", runtime)))
            return counts[-1] == 1 or min(shares[rank]) == 1

        # One that finds another there ends; and the epochs may be over before one has begun.
        until(is_as_expected)
        result = {
            "seen": seen,
            "direct": [epoch.direct for epoch in loader.epoch_stats],
            "hits": [epoch.hits for epoch in loader.epoch_stats],
            "prefetching": counts[-1],
        }
        distributed.barrier()  # none goes before the others have looked
    return result


def ranks_of(
    root: Path, shares: list[list[float]], workers: int = 0, recipe: str = "foresight"
) -> list[Any]:
    """Run the ranks, and see that each sample was served once in each epoch."""
    found = run_ranks(len(shares), root.parent, train, root, shares, workers, recipe)
    for epoch in range(EPOCHS):
        assert sorted(n for rank in found for n in rank["seen"][epoch]) == list(range(NUM))
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_stand_aside(root: Path, workers: int) -> None:
    found = ranks_of(root, [[1.0] * EPOCHS] * 2, workers)
    for rank in found:
        assert rank["direct"] == [NUM // 2] * EPOCHS
        assert rank["hits"] == [0] * EPOCHS
        assert rank["prefetching"] == 0


@pytest.mark.parametrize("recipe", ["foresight", "foresight:adaptive=true", "minio"])
def test_one_rank_of_three_does_not(root: Path, recipe: str) -> None:
    shares = [[1.0] * EPOCHS, [0.0] * EPOCHS, [1.0] * EPOCHS]
    found = ranks_of(root, shares, recipe=recipe)
    assert [rank["direct"] for rank in found] == [[NUM // 3] * 3, [0] * 3, [NUM // 3] * 3]
    assert found[1]["hits"][0] == 0
    assert found[0]["hits"] == found[2]["hits"] == [0] * EPOCHS


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_take_turns(root: Path, workers: int) -> None:
    found = ranks_of(root, [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], workers)
    half = NUM // 2
    assert [rank["direct"] for rank in found] == [[half, 0, half], [0, half, 0]]
    assert found[1]["prefetching"] == 1


# --- jobs ---


def job(root: Path, share: float, seed: int, workers: int = 0) -> tuple[Loader, Told]:
    samples = dataset(root, share)
    # Nothing is read ahead, or it would be chance what hits.
    loader = Loader(samples, BATCH, num_workers=workers, cache=Cache("50%", prefetch=0), seed=seed)
    return loader, samples.source  # type: ignore[return-value]


def in_turn(loaders: list[Loader]) -> None:
    """Read an epoch of each, a batch of one after the other; see that each is whole."""
    begun: list[Iterator[Any]] = [iter(loader) for loader in loaders]
    seen: list[list[int]] = [[] for _ in loaders]
    going = dict(enumerate(begun))
    while going:
        for number, batches in list(going.items()):
            batch = next(batches, None)
            if batch is None:
                del going[number]
            else:
                seen[number] += batch.tolist()
    assert [sorted(each) for each in seen] == [list(range(NUM))] * len(loaders)


@pytest.mark.parametrize("workers", [0, 2])
def test_jobs_at_one_cache_decide_alone(root: Path, workers: int) -> None:
    (aside, _), (through, _) = (
        job(root, 1.0, 0, workers),
        job(root, 0.0, 1, workers),
    )
    with aside, through:
        for _ in range(3):
            in_turn([aside, through])
        assert aside.cache is not None
        assert through.cache is not None
        assert [each.direct for each in aside.epoch_stats] == [NUM] * 3
        assert [each.direct for each in through.epoch_stats] == [0] * 3
        assert aside.stats.hits == 0
        assert all(each.hits > 0 for each in through.epoch_stats[1:])
        assert aside.stats.cache_bytes == through.stats.cache_bytes > 0


def test_a_job_comes_back_to_a_cache_that_another_filled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_INTERVAL", 0.0)
    first, source = job(root, 1.0, 0)
    second, _ = job(root, 0.0, 1)
    with first, second:
        in_turn([first, second])
        batches = iter(first)
        seen = [number for _ in range(5) for number in next(batches).tolist()]
        source.share = 0.0
        seen += [number for batch in batches for number in batch.tolist()]
        assert sorted(seen) == list(range(NUM))
        assert 5 * BATCH <= first.epoch_stats[1].direct < NUM
        assert first.epoch_stats[1].hits > 0, "what the other one brought"
        in_turn([first, second])
        assert first.epoch_stats[2].direct == 0 < first.epoch_stats[2].hits


def test_three_jobs_of_which_two_stand_aside_in_turn(root: Path) -> None:
    jobs = [job(root, 1.0, seed) for seed in range(3)]
    loaders = [loader for loader, _ in jobs]
    with loaders[0], loaders[1], loaders[2]:
        for epoch in range(3):
            for number, (_, source) in enumerate(jobs):
                source.share = float(number != epoch)
            in_turn(loaders)
        for number, loader in enumerate(loaders):
            found = [each.direct for each in loader.epoch_stats]
            assert found == [0 if epoch == number else NUM for epoch in range(3)]


def test_nothing_is_kept_for_a_job_that_stands_aside(root: Path) -> None:
    def hits(share: float | None) -> list[int]:
        alone, _ = job(root, 0.0, 1)
        loaders = [alone]
        with ExitStack() as stack:
            stack.enter_context(alone)
            if share is not None:
                loaders.append(stack.enter_context(job(root, share, 0)[0]))
            for _ in range(3):
                in_turn(loaders)
            return [each.hits for each in alone.epoch_stats]

    assert hits(1.0) == hits(None) != hits(0.0)

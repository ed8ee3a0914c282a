"""Data-parallel ranks: one plan, one cache, equal lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import Squares, ids_in, images, number_of, numbers, with_noise
from support.ranks import run_ranks
from torch import distributed
from torch.utils.data import DistributedSampler

from stoker import Cache
from stoker.errors import ConfigError
from stoker.pytorch import Loader, SampleDataset, wrap
from stoker.types import Outcome


def loader_of(count: int, rank: int, world_size: int, **arguments: Any) -> Loader:
    dataset = SampleDataset(numbers(count), number_of)
    options: dict[str, Any] = {"batch_size": 8, "cache": 0, **arguments}
    return Loader(dataset, rank=rank, world_size=world_size, **options)


def ids_of(loader: Loader) -> list[int]:
    with loader:
        return [int(i) for batch in loader for i in batch]


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_one_plan_in_equal_parts(drop_last: bool) -> None:
    loaders = [loader_of(101, rank, 4, drop_last=drop_last) for rank in range(4)]
    assert {len(loader) for loader in loaders} == {3 if drop_last else 4}
    parts = [ids_of(loader) for loader in loaders]
    assert {len(part) for part in parts} == {24 if drop_last else 26}
    found = sorted(i for part in parts for i in part)
    assert len(found) - len(set(found)) == (0 if drop_last else 3)  # 104 places for 101 samples
    whole = ids_of(loader_of(101, 0, 1))
    assert parts[1][:24] == whole[1::4][:24]


def test_shuffle_false_is_not_filled_up() -> None:
    parts = [ids_of(loader_of(11, rank, 4, shuffle=False)) for rank in range(4)]
    assert parts == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7]]


def test_augmentation_does_not_depend_on_the_ranks(image_root: Path) -> None:
    def noise(rank: int, world_size: int) -> dict[int, float]:
        loader = Loader(
            images(image_root, with_noise), 6, cache=0, rank=rank, world_size=world_size
        )
        with loader:
            found: dict[int, float] = {}
            for batch, _ in loader:
                values = batch[:, 0, 0, 0].tolist()
                found |= zip(loader.last_ids.tolist(), values, strict=True)
            return found

    assert noise(0, 2) | noise(1, 2) == noise(0, 1)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (2, 2, "rank=2 is out of range"),
        (-1, 2, "rank=-1"),
        (0, 0, "world_size=0"),
        (1, None, "both or neither"),
    ],
)
def test_bad_ranks(rank: int, world_size: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader_of(10, rank, world_size)


def test_torchrun_says_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(SampleDataset(numbers(20), number_of), batch_size=1, cache=0)
    assert len(loader) == 20
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(loader) == 10
    iter(loader)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert len(loader) == 10  # as it was at the first iteration
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ConfigError, match="the environment says"):
        len(Loader(SampleDataset(numbers(20), number_of), batch_size=1, cache=0))


def loss_of(ids: Any) -> Any:
    return (ids * 7919) % 1009 / 10


def train(rank: int, root: Path) -> dict[str, Any]:
    """Three epochs with 4 workers and 3 micro-batches a step, each drawn before it is observed."""
    with Loader(
        images(root),
        batch_size=4,
        num_workers=4,
        persistent_workers=True,
        cache=Cache("50%", prefetch=0, stands_aside=False),
        recipe="minio",  # a rank that is ahead would bring in what the other one counts as read
        return_meta=True,
        multiprocessing_context="fork",  # these ranks are spawned, and would spawn their workers
    ) as loader:
        for _ in range(3):
            waiting = []
            for batch, _, meta in loader:
                waiting.append((loss_of(torch.tensor(ids_in(batch))), meta))
                if len(waiting) == 3 or meta.token % len(loader) == len(loader) - 1:
                    for losses, its_meta in reversed(waiting):
                        loader.observe(losses, meta=its_meta)
                    waiting.clear()
        scores, stats = loader.scores, loader.stats
        distributed.barrier()
        return {
            "seen": scores.seen.copy(),
            "values": scores.values.copy(),
            "lengths": [stats.accesses, len(loader)],
            "fetched": [epoch.fetched for epoch in loader.epoch_stats],
            "first_epoch": loader.epoch_stats[0],
        }


def test_score_lands_on_the_served_sample(image_root: Path, tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, train, image_root)
    for result in ranks:
        seen = result["seen"] > 0
        assert seen.sum() >= 30
        expected = loss_of(np.arange(60))
        np.testing.assert_allclose(result["values"][seen], expected[seen], rtol=1e-6)
        assert result["lengths"] == [90, 8]
    assert sum(result["seen"] for result in ranks).tolist() == [3] * 60
    # One arena for both ranks: each sample is read once in the first epoch, by whichever rank,
    # and half of them are kept.
    assert sum(result["fetched"][0] for result in ranks) == 60
    later = sum(result["fetched"][1] for result in ranks)
    assert 28 <= later <= 34


def private_set(rank: int) -> tuple[int, int]:
    with Loader(wrap(Squares(40)), batch_size=4, cache="100%") as loader:
        for _ in loader:
            pass
        distributed.barrier()
        outcomes = []
        for _ in loader:
            outcomes += loader.last_outcomes.tolist()
        distributed.barrier()
        return outcomes.count(Outcome.HIT), loader.stats.fetched


def test_ranks_share_the_cache_of_a_wrapped_set_without_a_name(tmp_path: Path) -> None:
    hits, fetched = zip(*run_ranks(2, tmp_path, private_set), strict=True)
    assert hits == (20, 20)
    assert sum(fetched) == 40


def test_ranks_that_cannot_agree_on_a_private_cache_are_told() -> None:
    with (
        Loader(wrap(Squares(40)), batch_size=4, rank=0, world_size=2) as loader,
        pytest.warns(RuntimeWarning, match="2 ranks each keep a cache"),
    ):
        iter(loader)


def own_sampler(rank: int) -> list[list[int]]:
    dataset = SampleDataset(numbers(20), number_of)
    sampler = DistributedSampler(dataset, seed=3)
    with Loader(dataset, batch_size=4, sampler=sampler, cache=0) as loader:
        epochs = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            expected = list(sampler)
            epochs.append([int(i) for batch in loader for i in batch])
            assert epochs[-1] == expected
        return epochs


def test_a_distributed_sampler_of_ones_own(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, own_sampler)
    assert first[0] != first[1]
    assert sorted(first[0] + second[0]) == list(range(20))


def test_srun_says_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(SampleDataset(numbers(20), number_of), batch_size=1, cache=0)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert len(loader) == 20, "a batch script has these too and is one process"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert len(loader) == 5
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(loader) == 10, "torchrun under srun knows better"

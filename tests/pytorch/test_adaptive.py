"""foresight(adaptive=True) in training: measured, agreed on, written down."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.parts import number_of, numbers
from support.ranks import run_ranks

from stoker import Cache, recipes
from stoker.pytorch import Loader, SampleDataset
from stoker.testing.sources import SlowSource

NUM = 60


def loader_of(**options: Any) -> Loader:
    # Training takes no time, so that storage, however slow, supplies next to nothing of it.
    source = SlowSource(numbers(NUM), latency=0.004)
    dataset = SampleDataset(source, number_of, targets=np.arange(NUM) % 4)
    return Loader(
        dataset,
        10,
        cache=Cache("20%", prefetch=0),
        recipe=recipes.foresight(adaptive=True, annealed=0.0),
        return_meta=True,
        **options,
    )


def train(loader: Loader, epochs: int) -> list[list[int]]:
    """Return how often each sample came in each epoch."""
    visits = []
    for _ in range(epochs):
        counts = np.zeros(NUM, np.int64)
        for ids, _, meta in loader:
            loader.observe(1 + ids.double() / 10, meta=meta)
            np.add.at(counts, ids.numpy(), 1)
        visits.append(counts.tolist())
    return visits


def test_slow_storage_makes_it_repeat(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stoker"), loader_of() as loader:
        visits = train(loader, 4)
        supplies, hits = loader.scores.supplies, loader.scores.hit_ratios
    assert visits[0] == visits[1] == [1] * NUM, "until it is known what storage supplies"
    assert max(visits[2]) > 1 and sum(visits[2]) == NUM
    assert (supplies[:3] < 1).all() and (supplies[:3] >= 0).all()
    assert hits[0] == 0 and hits[1] == pytest.approx(0.2, abs=0.05)
    said = [record.getMessage() for record in caplog.records]
    assert any("epoch 0: each sample once an epoch: what storage" in line for line in said)
    assert any(re.search(r"epoch 2: each sample \d times in \d epochs", line) for line in said)


def test_a_run_that_goes_on_draws_what_it_would_have_drawn() -> None:
    with loader_of() as loader:
        train(loader, 3)
        state = loader.state_dict()
        coming = next(iter(loader))[0].tolist()
    with loader_of() as again:
        again.load_state_dict(state)
        assert next(iter(again))[0].tolist() == coming
        assert again.scores.supplies.tolist()[:2] == loader.scores.supplies.tolist()[:2]


def of_rank(rank: int) -> Any:
    with loader_of() as loader:
        visits = train(loader, 4)
        return visits, loader.scores.supplies[:3].tolist()


def test_ranks_decide_alike(tmp_path: Path) -> None:
    (first, supplies), (second, others) = run_ranks(2, tmp_path, of_rank)
    assert supplies == others
    for epoch in range(4):
        assert sum(first[epoch]) == sum(second[epoch]) == NUM // 2
    assert (np.array(first[:2]) + second[:2] == 1).all()


def test_work_of_the_training_process_is_not_waiting_for_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # By a clock that stands while others have the processor, which is neither work nor waiting.
    monkeypatch.setattr(time, "perf_counter", time.thread_time)

    def decode(data: bytes) -> Any:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.004:
            pass
        return number_of(data)

    dataset = SampleDataset(numbers(NUM), decode, targets=np.arange(NUM) % 4)
    adaptive = recipes.foresight(adaptive=True)
    with Loader(
        dataset, 10, cache=Cache("20%", prefetch=0), recipe=adaptive, return_meta=True
    ) as loader:
        train(loader, 2)
        # Nothing of the loop is outside of the loader, and storage is as fast as memory.
        assert (loader.scores.supplies[:2] > 0.3).all()

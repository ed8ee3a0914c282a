"""Clocks of nodes may disagree: what nodes agree on is made without any."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.modules import SOURCE, module
from support.parts import number_of, numbers
from support.ranks import run_ranks

from stoker import Cache
from stoker.pytorch import Loader, SampleDataset
from stoker.testing.sources import SlowSource

AGREED = [
    *(SOURCE / "sampler" / name for name in ("homes.py", "draws.py")),
    SOURCE / "epoch" / "ranks.py",
    SOURCE / "pytorch" / "distributed_sampler.py",
]


@pytest.mark.parametrize("path", AGREED, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_nothing_that_nodes_agree_on_reads_a_clock(path: Path) -> None:
    imported = set()
    for node in module(path).nodes:
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {"time", "datetime"}


NUM, BATCH, EPOCHS = 120, 10, 4
DAY = 24 * 3600.0


def train(rank: int, recipe: str, speed: float, ahead: float) -> list[list[list[int]]]:
    """The batches of each epoch; the clocks of rank 1 go wrong."""
    os.environ["STOKER_NODE"] = f"n{rank}"
    if rank:
        for name in ("time", "monotonic", "perf_counter"):
            right = getattr(time, name)
            setattr(time, name, lambda right=right: speed * right() + ahead)
    source = SlowSource(numbers(NUM), latency=0.004)
    epochs = []
    with Loader(
        SampleDataset(source, number_of),
        BATCH,
        recipe=recipe,
        cache=Cache("20%", prefetch=0),
        return_meta=True,
    ) as loader:
        for _ in range(EPOCHS):
            batches = []
            for batch, meta in loader:
                loader.observe(1 + meta.ids.astype(np.float32) / 10, meta=meta)
                batches.append(batch.tolist())
            epochs.append(batches)
    return epochs


@pytest.mark.parametrize(("speed", "ahead"), [(0.1, -DAY), (3.0, DAY)])
def test_plans_are_those_of_right_clocks(speed: float, ahead: float, tmp_path: Path) -> None:
    right, wrong = (tmp_path / name for name in ("right", "wrong"))
    for place in (right, wrong):
        place.mkdir()
    expected = run_ranks(2, right, train, "shade", 1.0, 0.0)
    assert run_ranks(2, wrong, train, "shade", speed, ahead) == expected


def test_ranks_whose_clocks_disagree_adapt_alike(tmp_path: Path) -> None:
    """What storage supplies is measured by clocks, and decides which samples come."""
    found: list[Any] = run_ranks(2, tmp_path, train, "foresight:adaptive=true", 1000.0, -DAY)
    for epochs in zip(*found, strict=True):
        lengths = [[len(batch) for batch in rank] for rank in epochs]
        assert lengths == [[BATCH] * (NUM // BATCH // 2)] * 2
    visits = np.bincount(np.array(found)[:, -1].ravel(), minlength=NUM)
    assert visits.max() > 1, "it has adapted"

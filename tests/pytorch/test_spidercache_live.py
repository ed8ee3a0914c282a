"""SpiderCache in the Loader: ranks share its key samples, and prefetch heeds them.

Who is like whom is made up, so that it is known: samples of one group are all neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import number_of, numbers
from support.ranks import run_ranks
from support.waiting import until
from torch import distributed

from stoker import Cache, recipes
from stoker.prefetch.walk import SERVED
from stoker.pytorch import Loader, SampleDataset
from stoker.recipes import Recipe
from stoker.recipes.base import part
from stoker.sim.signals import MadeUpGraph
from stoker.testing.sources import SlowSource
from stoker.types import Outcome

NUM, MANY, BATCH = 400, 2000, 8


def spidercache(degree: float = 50.0) -> Recipe:
    made_up = part(MadeUpGraph, degree=degree)
    return replace(recipes.spidercache(start=0.8, parts="importance+homophily"), scorer=made_up)


def train(rank: int) -> dict[str, Any]:
    """Two epochs, in which rank 0 alone scores samples."""
    dataset = SampleDataset(numbers(NUM), number_of)
    substitutes: list[int] = []
    with Loader(
        dataset, batch_size=BATCH, cache=Cache("25%", prefetch=0), recipe=spidercache(), epochs=2
    ) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch.tolist() == loader.last_ids.tolist()
                taken = loader.last_outcomes == Outcome.SUBSTITUTED
                substitutes += loader.last_ids[taken].tolist()
                if rank == 0:
                    loader.observe(torch.ones(len(batch)))
        cached: Any = loader.cache
        distributed.barrier()
        keys = cached.store.tier.list("homophily").tolist()
        distributed.barrier()
    return {"substitutes": substitutes, "keys": keys}


@pytest.mark.parametrize("world_size", [2, 4])
def test_s5_what_one_rank_knows_all_ranks_serve(world_size: int, tmp_path: Path) -> None:
    ranks = run_ranks(world_size, tmp_path, train)
    assert len({tuple(result["keys"]) for result in ranks}) == 1, "one queue"
    assert ranks[0]["keys"]
    for result in ranks:
        assert len(result["substitutes"]) > 20 / world_size


def has_seen_to(marks: Any, batch: slice) -> bool:
    return marks.handed_out >= batch.stop or bool((marks.served[batch] == SERVED).all())


def take_slowly(loader: Loader, epoch: int) -> Iterator[Any]:
    """Yield the batches of an epoch, each once the prefetch process has seen to it."""
    batches = iter(loader)
    for number in range(len(loader)):
        marks = loader._session.controller.opened.ahead.progress._marks(epoch)  # type: ignore[union-attr]
        last = slice(number * BATCH, (number + 1) * BATCH)
        until(partial(has_seen_to, marks, last))
        yield next(batches)


def test_s7_prefetch_reads_what_no_key_sample_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the training process must read itself, since prefetch left it out, is next to nothing.

    And what has a stand-in is not read.
    """
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    read_here: list[int] = []
    read_packed = SlowSource.read_packed

    def counted(self: SlowSource, ids: Any) -> Any:
        read_here.extend(np.asarray(ids).tolist())
        return read_packed(self, ids)

    monkeypatch.setattr(SlowSource, "read_packed", counted)
    source = SlowSource(numbers(MANY), latency=0.001)
    dataset = SampleDataset(source, number_of)
    with Loader(dataset, batch_size=BATCH, cache="25%", recipe=spidercache(8), epochs=4) as loader:
        for epoch in range(4):
            for batch in take_slowly(loader, epoch):
                loader.observe(torch.ones(len(batch)))
        stats = loader.stats
    assert len(read_here) < 0.04 * stats.accesses
    assert stats.substituted > 0.2 * stats.accesses, "what is read ahead takes no stand-in's place"
    assert source.reads.sum() > 0.2 * stats.accesses, "prefetch is of use"

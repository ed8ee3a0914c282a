"""Several nodes with a pool: a sample is looked for at home, then there, then at the source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import run_ranks
from support.redis_servers import Server, needs_server
from support.waiting import until
from torch import distributed

from pytorch.on_nodes import N, alone, cached_in, loader_of

pytestmark = [needs_server, pytest.mark.filterwarnings("ignore:the pool:RuntimeWarning")]
EPOCHS = 4
LOST = set(range(0, N, 3))
"""Samples that the pool loses before the last epoch."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("--maxmemory-policy", "volatile-ttl", "--maxmemory", "100mb")
    yield made
    made.close()


def train(rank: int, port: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What each epoch brought to this rank; nothing is being stored when the next one begins."""
    import redis

    os.environ["STOKER_NODE"] = f"n{rank}"
    address = f"valkey://127.0.0.1:{port}?timeout=5"
    epochs, before = [], set()
    with (
        redis.Redis(port=port) as client,
        loader_of(pool=address, epochs=EPOCHS, **options) as loader,
    ):
        for epoch in range(EPOCHS):
            steps, served = [], set()
            for batch, meta in loader:
                steps.append(batch.tolist())
                served |= set(meta.ids.tolist())
            store: Any = loader.cache.store  # type: ignore[union-attr]
            kept = set(cached_in(loader))
            epochs.append(
                {
                    "steps": steps,
                    "served": served,
                    "kept": kept,
                    "at home": served & before & kept,
                    "stats": loader.epoch_stats[-1],
                    "reads": store.source.reads.copy(),
                }
            )
            before = kept
            if epoch < EPOCHS - 1:
                until(lambda: client.dbsize() == N)
                distributed.barrier()
            if epoch == EPOCHS - 2:
                store.pool.discard(np.array(sorted(LOST), np.uint32))
                assert store.pool.flush(10)
                distributed.barrier()
        distributed.barrier()
    return epochs


def assert_steps_of_one_node(runs: list[list[dict[str, Any]]]) -> None:
    for one, other, expected in zip(*runs, alone(EPOCHS), strict=True):
        for here, there, step in zip(one["steps"], other["steps"], expected, strict=True):
            assert len(here) == len(there)
            assert sorted(here + there) == sorted(step)
        assert not one["kept"] & other["kept"]


def test_home_then_pool_then_source(server: Server, tmp_path: Path) -> None:
    """To the sample: minio evicts nothing, and nothing is read ahead."""
    runs = run_ranks(2, tmp_path, train, server.port, {"recipe": "minio"})
    assert_steps_of_one_node(runs)
    for rank in runs:
        for epoch, now in enumerate(rank):
            stats, home = now["stats"], now["at home"]
            assert stats.accesses == len(now["served"]) == N // 2
            elsewhere = now["served"] - home
            lost = {0: elsewhere, EPOCHS - 1: elsewhere & LOST}.get(epoch, set())
            earlier = rank[epoch - 1]["reads"] if epoch else np.zeros(N)
            assert set(np.flatnonzero(now["reads"] - earlier).tolist()) == lost
            assert (stats.fetched, stats.pool_hits) == (len(lost), len(elsewhere - lost))
            assert stats.hits == len(home) + stats.pool_hits
            assert len(home) > (0.3 * N // 2 if epoch else -1)
    stats = [now["stats"] for rank in runs for now in rank]
    kept = runs[0][-1]["at home"] | runs[1][-1]["at home"]
    with server.client() as client:
        until(lambda: client.dbsize() == N - len(LOST & kept))  # one copy of each
        counts = client.info("stats")
    assert counts["keyspace_hits"] == sum(each.pool_hits for each in stats)
    assert counts["keyspace_misses"] == sum(each.fetched for each in stats)
    assert sum(each.pool_dropped + each.pool_damaged + each.pool_errors for each in stats) == 0


def test_read_ahead_and_by_next_use(server: Server, tmp_path: Path) -> None:
    options = {"recipe": "belady", "prefetch": "1MiB", "num_workers": 1}
    options["multiprocessing_context"] = "fork"  # these ranks are spawned, and would spawn theirs
    runs = run_ranks(2, tmp_path, train, server.port, options)
    assert_steps_of_one_node(runs)
    for rank in runs:
        for now in rank:
            stats = now["stats"]
            assert stats.accesses == len(now["served"]) == N // 2
            assert stats.hits + stats.fetched == stats.accesses
        # Read ahead was before the pool had what the other node reads.
        before, after = rank[1]["reads"], rank[-2]["reads"]
        assert (before == after).all()
        assert rank[-2]["stats"].fetched == 0
        read = set(np.flatnonzero(rank[-1]["reads"] - after).tolist())
        assert read <= LOST

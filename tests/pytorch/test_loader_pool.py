"""The Loader with a pool of servers below its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.caches import gathered
from support.numbered import NUM, SAMPLES, epoch, number_of, reads_of, slow_dataset
from support.redis_servers import Server, needs_server

from stoker import Cache
from stoker.errors import ConfigError
from stoker.pytorch import Loader, SampleDataset, with_cache, wrap
from stoker.source.held import MemorySource

pytestmark = [needs_server, pytest.mark.filterwarnings("ignore:the pool:RuntimeWarning")]
SIZE = sum(map(len, SAMPLES))


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    made = []

    def make(*options: str) -> Server:
        made.append(Server("--maxmemory-policy", "volatile-ttl", *options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start("--maxmemory", "100mb")


def loader_of(dataset: Any, server: Server, **options: Any) -> Loader:
    given = {"batch_size": 16, "cache": "20%", "pool": f"valkey://{server.name}?timeout=5"}
    return Loader(dataset, **gathered(given | options))


@pytest.mark.parametrize("cache", ["20%", 0])
@pytest.mark.parametrize(("num_workers", "ahead"), [(0, "1MiB"), (2, "1MiB"), (2, 0)])
def test_what_one_node_read_the_next_one_need_not(
    num_workers: int, ahead: int | str, cache: int | str, server: Server
) -> None:
    options = {"num_workers": num_workers, "prefetch": ahead, "epochs": 2, "cache": cache}
    with loader_of(slow_dataset(), server, **options) as first:
        assert epoch(first) == list(range(NUM))
        assert first.stats.fetched == NUM
    with server.client() as client:
        assert client.dbsize() == NUM
    dataset = slow_dataset()
    with loader_of(dataset, server, **options) as second:
        for _ in range(2):
            assert epoch(second) == list(range(NUM))
        stats = second.stats
        assert (stats.hits, stats.fetched, stats.accesses) == (2 * NUM, 0, 2 * NUM)
        assert stats.pool_hits >= NUM
        assert stats.bytes_from_pool >= SIZE
        assert stats.bytes_from_source == 0
        assert stats.byte_hit_ratio == 1
        assert (stats.pool_open, stats.pool_errors, stats.pool_damaged) == (0, 0, 0)
    assert reads_of(dataset) == 0


def test_hits_of_the_pool_enter_memory_by_its_rules(server: Server) -> None:
    with loader_of(slow_dataset(), server) as first:
        epoch(first)
    with loader_of(slow_dataset(), server, cache="20%", recipe="minio", epochs=2) as second:
        epoch(second)
        second.end_epoch()
        epoch(second)
        second.end_epoch()
        assert second.epoch_stats[-1].hits == NUM
        # Of both epochs: what is read ahead counts when it is read, if need be in the one before;
        # and batches that are held up leave what they had in memory for the next epoch's first.
        taken = sum(each.bytes_from_pool for each in second.epoch_stats)
        assert taken == pytest.approx(1.8 * SIZE, abs=0.15 * SIZE)


def test_only_the_share_asked_for_is_stored(server: Server) -> None:
    with loader_of(slow_dataset(), server, pool_size="25%") as loader:
        epoch(loader)
    with server.client() as client:
        assert 0.2 * NUM < client.dbsize() < 0.32 * NUM
    dataset = slow_dataset()
    with loader_of(dataset, server, pool_size="25%", cache=0) as loader:
        assert epoch(loader) == list(range(NUM))
        assert 0.2 < loader.stats.hit_ratio < 0.32
        assert loader.stats.fetched == reads_of(dataset)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_server_that_dies_costs_reads_and_no_sample(num_workers: int, server: Server) -> None:
    with loader_of(slow_dataset(), server) as first:
        epoch(first)
    options = {"num_workers": num_workers, "prefetch": 0, "cache": 0}
    with loader_of(slow_dataset(), server, **options) as loader:
        seen = []
        for number, batch in enumerate(loader):
            seen += [int(i) for i in batch]
            if number == 5:
                server.kill()
        assert sorted(seen) == list(range(NUM))
        stats = loader.stats
        assert stats.fetched > 0
        assert stats.pool_hits > 0
        assert stats.hits + stats.fetched == NUM
        assert stats.pool_open == 1
        assert stats.failed == stats.bypassed == 0


def test_a_full_server_evicts_and_nothing_is_wrong(start: Callable[..., Server]) -> None:
    big = [np.full(2500, i, np.int32).tobytes() for i in range(NUM)]  # 4 MB
    server = start("--maxmemory", "3mb")
    for _ in range(2):
        with loader_of(slow_dataset(big), server, cache=0, epochs=2) as loader:
            for _ in range(2):
                assert epoch(loader) == list(range(NUM))
    assert 0.05 < loader.stats.hit_ratio < 0.9
    assert loader.stats.pool_damaged == 0


def test_a_sample_that_does_not_decode_does_not_stay(server: Server) -> None:
    def decode(data: Any) -> int:
        if bytes(data) == b"bad":
            raise ValueError("bad")
        return number_of(data)

    bad = [*SAMPLES]
    bad[7] = b"bad"
    with loader_of(SampleDataset(MemorySource(bad), decode), server, on_error="skip") as loader:
        assert 7 not in epoch(loader)
    with server.client() as client:
        assert client.dbsize() == NUM - 1


def test_without_the_loader_too(server: Server) -> None:
    address = f"redis://{server.name}?timeout=5"
    with_cache(slow_dataset(), Cache("10%", pool=address)).close()
    for _ in range(2):
        dataset = slow_dataset()
        cached = with_cache(dataset, Cache(0, pool=address, pool_size="1GiB"))
        assert [int(i) for i in cached.__getitems__(range(NUM))] == list(range(NUM))
        cached.close()
    assert reads_of(dataset) == 0


def test_importance_reaches_the_server(server: Server) -> None:
    with loader_of(slow_dataset(), server, recipe="belady", epochs=3) as loader:
        for _ in range(3):
            assert epoch(loader) == list(range(NUM))
    with server.client() as client:
        lifetimes = [client.pttl(name) for name in client.keys("stoker:*")]
    assert len(lifetimes) == NUM
    assert max(lifetimes) - min(lifetimes) > 20 * 24 * 3600 * 1000


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"pool": "http://h"}, "valkey://h1"),
        ({"pool": None, "pool_size": "1GiB"}, "needs servers"),
        ({"pool_size": "many"}, "pool_size='many'"),
        ({"pool_size": 10}, "largest sample"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        Loader(slow_dataset(), **gathered({"pool": "valkey://h"} | options))


def test_a_data_set_that_nobody_else_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give wrap"):
        Loader(wrap(SAMPLES), cache=Cache(pool="valkey://h"))
    Loader(wrap(SAMPLES), cache=Cache(pool="valkey://h", pool_size=0)).close()

"""Blocks through the Loader: requests that a server counts, resumed epochs, several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.file_server import FileServer
from support.ranks import run_ranks

from stoker import Cache
from stoker.errors import ConfigError
from stoker.pytorch import Loader, SampleDataset
from stoker.source import FileSource, ShardSource
from stoker.source.pack import pack

NUM, BLOCK = 2000, 32
BLOCKS = 2 * -(-NUM // 2 // BLOCK)  # about: two shards, which differ by a few samples


def number_of(data: Any) -> int:
    """The sample's number, after a look at every byte of it."""
    values = np.frombuffer(data, np.int32)
    assert (values == values[0]).all()
    return int(values[0])


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards that were packed from files."""
    folder = tmp_path_factory.mktemp("packed")
    files = [folder / "files" / f"{number}.bin" for number in range(NUM)]
    files[0].parent.mkdir()
    for number, file in enumerate(files):
        file.write_bytes(np.full(300 + number % 100, number, np.int32).tobytes())
    size = sum(file.stat().st_size + 1024 for file in files)
    pack(FileSource(files), folder / "shards", shard_bytes=size // 2 + 2048, seed=None)
    return folder / "shards"


@pytest.fixture
def server(packed: Path) -> Iterator[FileServer]:
    with FileServer(packed, latency=0.002) as server:
        yield server


def dataset_at(url: str) -> SampleDataset:
    shards = [f"{url}/shard-{number:06d}.tar" for number in range(2)]
    options = {"allow_http": True}
    return SampleDataset(ShardSource(shards, part="bin", storage_options=options), number_of)


def loader_at(url: str, **options: Any) -> Loader:
    recipe = f"foresight:block={BLOCK}"
    arguments = {"batch_size": 32, "cache": "20%", "recipe": recipe, "epochs": 3}
    return Loader(dataset_at(url), **{**arguments, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_block_is_a_request(server: FileServer, workers: int) -> None:
    with loader_at(server.url, num_workers=workers) as loader:
        for _ in range(3):
            before = server.requests
            seen = np.concatenate([batch.numpy() for batch in loader])
            assert sorted(seen.tolist()) == list(range(NUM))
            # Indexing is over; lanes and a worker that was not waited for cost a few more.
            assert server.requests - before < 2 * BLOCKS
        stats = loader.stats
    assert stats.accesses == stats.hits + stats.fetched == 3 * NUM
    assert stats.failed == stats.bypassed == 0


def test_without_blocks_they_are_ten_times_as_many(server: FileServer) -> None:
    with loader_at(server.url, recipe="foresight", epochs=1) as loader:
        before = server.requests
        assert sum(len(batch) for batch in loader) == NUM
        assert server.requests - before > 10 * BLOCKS


def test_it_resumes_where_it_was(server: FileServer) -> None:
    with loader_at(server.url) as loader:
        whole = [batch.tolist() for batch in loader]
    with loader_at(server.url) as loader:
        first = [batch.tolist() for batch in itertools.islice(loader, 20)]
        state = loader.state_dict()
    with loader_at(server.url) as loader:
        loader.load_state_dict(state)
        before = server.requests
        rest = [batch.tolist() for batch in loader]
        assert server.requests - before < 2 * BLOCKS
    assert first + rest == whole


def test_ranks_read_whole_blocks_in_equal_steps(server: FileServer, tmp_path: Path) -> None:
    before = server.requests
    parts = run_ranks(2, tmp_path, _epoch, server.url)
    indexing = 2 * (2 + NUM * 2048 // 2**20 + 2)  # pages of the shards, by each of two ranks
    assert server.requests - before < 2 * BLOCKS + 2 * indexing
    assert len(parts[0]) == len(parts[1])
    assert sorted(itertools.chain(*parts[0], *parts[1])) == list(range(NUM))


def _epoch(rank: int, url: str) -> list[list[int]]:
    with loader_at(url, epochs=1) as loader:
        return [batch.tolist() for batch in loader]


def test_a_cache_that_holds_no_block_is_refused(packed: Path) -> None:
    shards = sorted(packed.glob("*.tar"))
    dataset = SampleDataset(ShardSource(shards, part="bin"), number_of)
    for cache in (0, Cache("1%")):
        with pytest.raises(ConfigError, match="give it room for 64"):
            Loader(dataset, cache=cache, recipe="foresight:block=32")

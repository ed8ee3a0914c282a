"""What somebody else wrote into a pool or a directory of the cache runs no code and is a miss."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.parts import Squares, images
from support.redis_servers import Server, needs_server

from stoker import Cache
from stoker.pool import values as pool_frame
from stoker.pool.values import PoolKeys
from stoker.pytorch import with_cache, wrap
from stoker.pytorch.wrapped import same
from stoker.source.packed import Packed
from stoker.types import Outcome


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("--maxmemory-policy", "volatile-ttl", "--maxmemory", "100mb")
    yield server
    server.close()


def packed(values: list[bytes]) -> Packed:
    data = np.frombuffer(bytearray(b"".join(values)), np.uint8)
    return Packed(data, np.array([0, *itertools.accumulate(map(len, values))], np.int64))


def is_right(index: int, sample: Any) -> bool:
    image, target = sample
    return bool((np.asarray(image) == index**2).all()) and target == index % 2


@needs_server
@pytest.mark.filterwarnings("ignore:the pool:RuntimeWarning")
def test_c3_what_lies_in_a_pool_runs_no_code(server: Server, tmp_path: Path) -> None:
    """Whoever writes to the pool knows the frame: an id, a sum, a digest of the data set's name."""
    dataset = wrap(Squares(40), name="squares")
    keys, ids = PoolKeys(dataset.source.fingerprint), np.arange(40, dtype=np.uint32)
    planted = [pickle.dumps(Payload(tmp_path / "ran"))] * 40
    with server.client() as client:
        for name, value in zip(
            keys.names(ids), pool_frame.seal(ids, packed(planted), keys.owner), strict=True
        ):
            client.set(name, value, ex=1000)
    cached = with_cache(dataset, Cache(0, pool=f"valkey://{server.name}?timeout=5"))
    try:
        fetched = cached.fetch(ids)
        assert not (tmp_path / "ran").exists()
        assert not fetched.errors and all(map(is_right, range(40), fetched.decoded))
        assert fetched.outcomes.tolist() == [Outcome.FETCHED] * 40
        stats = cached.store.stats()
        assert (stats["accesses"], stats["fetched"], stats["hits"]) == (40, 40, 0)
    finally:
        cached.close()


@pytest.mark.parametrize("stage", ["encoded", "decoded"])
def test_c2_what_lies_in_a_cache_dir_runs_no_code(
    stage: str, image_root: Path, tmp_path: Path
) -> None:
    """And is a miss: the sample comes from the source, and the access counts as a read."""
    dataset: Any = (
        wrap(Squares(40), name="squares") if stage == "encoded" else images(image_root, None)
    )
    cache = Cache(0, disk=tmp_path / "cache", stage=stage)
    ids = np.arange(5, dtype=np.uint32)
    with_cache(dataset, cache).close()
    cached = with_cache(dataset, cache)
    try:
        expected = [dataset[index] for index in ids.tolist()]
        payload = bytes([0] * (stage == "decoded")) + pickle.dumps(Payload(tmp_path / "ran"))
        cached.store.tier.put_many(ids, packed([payload, b"", b"?", *[payload] * 2]))
        cached.fetch(ids[[3]])
        assert not (tmp_path / "ran").exists()
        fetched = cached.fetch(ids[[0, 1, 4, 0]])
        assert fetched.outcomes.tolist() == [Outcome.FETCHED] * 4 and not fetched.errors
        finished = map(dataset.finish, fetched.ids.tolist(), fetched.decoded)
        for sample, index in zip(finished, [0, 1, 4, 0], strict=True):
            assert same(np.asarray(sample[0]), np.asarray(expected[index][0]))
            assert sample[1] == expected[index][1]
        stats = cached.store.stats()
        assert (stats["accesses"], stats["fetched"], stats["hits"]) == (5, 5, 0)
        assert stats["bytes_from_cache"] == 0 and stats["bytes_from_source"] > 0
        assert not cached.store.tier.get_many(ids)[1][[0, 1, 3, 4]].any()
    finally:
        cached.close()

"""A cache of resized photographs: the same pixels whoever reads, and more samples in a cache."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images.photographs import as_jpeg, photographs
from PIL import Image
from support.redis_servers import Server, needs_server

from stoker import Cache
from stoker.epoch.stage import ResizedSource, make_stage
from stoker.errors import ConfigError, SampleCorrupt, SourceUnavailable, StateMismatch
from stoker.feed import Batch, Feed
from stoker.images import Eval, Train, decode_image
from stoker.images.resize import Resized
from stoker.pytorch import ImageFolder, Loader, SampleDataset, wrap
from stoker.source import FileSource, MemorySource, ObjectSource
from stoker.testing.sources import FaultySource

FORM, NUM = Resized(96), 60
STAGE = "resized:96"
SMALL = as_jpeg(Image.new("RGB", (120, 96), "red"))


@cache
def stored() -> list[bytes]:
    return [*photographs(), SMALL]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs in one class, of which each seventh is small."""
    folder = tmp_path_factory.mktemp("photographs")
    (folder / "class").mkdir()
    for number in range(NUM):
        (folder / "class" / f"{number:02}.jpg").write_bytes(stored()[number % len(stored())])
    return folder


def source_of(samples: list[bytes]) -> ResizedSource:
    return ResizedSource(MemorySource(samples), FORM)


# --- the source ---


def test_samples_are_small_or_as_they_were() -> None:
    source = source_of(stored())
    expected = [bytes(FORM(sample)) for sample in stored()]
    assert expected[-1] == SMALL and len(expected[0]) < len(stored()[0]) / 4
    ids = [6, 0, 3, 0]
    assert source.read(ids) == [expected[i] for i in ids]
    assert [source.read_one(i) for i in range(7)] == expected
    assert source.read_each(ids)[0] == [expected[i] for i in ids]
    assert source.read([]) == []
    assert pickle.loads(pickle.dumps(source.fingerprint)) == source.fingerprint


def test_sizes_are_estimates() -> None:
    source, before = source_of(stored() * 20), MemorySource(stored() * 20).sizes
    after = sum(len(FORM(sample)) for sample in stored()) * 20
    assert not source.sizes_are_exact
    assert int(source.sizes.sum()) == pytest.approx(after, rel=0.15)
    assert source.factor < 0.3 and np.all(source.sizes <= before)
    with pytest.raises(ValueError, match="read-only"):
        source.sizes[0] = 1


def test_samples_that_fail_are_named_and_others_come() -> None:
    faulty = FaultySource(MemorySource(stored()), latency=0, always={2: "not_found"})
    source = ResizedSource(faulty, FORM)
    samples, errors = source.read_each([0, 2, 1])
    assert [sample is None for sample in samples] == [False, True, False]
    assert list(errors) == [1]


def test_samples_that_are_no_photographs_keep_their_size() -> None:
    source = source_of([b"text", b"", b"more text"])
    assert source.factor == 1 and source.sizes.tolist() == [4, 0, 9]


# --- the stage ---


def test_keys_tell_forms_apart(root: Path) -> None:
    dataset = ImageFolder(root)
    names = ("encoded", "decoded", "resized:96", "resized:97", "resized:96:80")
    stages = {name: make_stage(dataset, name) for name in names}
    assert len({stage.key for stage in stages.values()}) == len(stages)
    assert make_stage(dataset, "resized:96:90").key == stages["resized:96"].key
    assert not stages["resized:96"].is_private and stages["resized:96"].can_read_ahead


def test_wrapped_samples_are_not_resized() -> None:
    class Own(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ConfigError, match="'resized:96' has no meaning for a wrapped data set"):
        Loader(wrap(Own()), cache=Cache(stage=STAGE))


def test_shares_are_of_the_originals(root: Path) -> None:
    dataset = ImageFolder(root, decode=len)
    whole = int(dataset.source.sizes.sum())
    with Loader(dataset, 10, cache=Cache("4%", stage=STAGE), epochs=3) as loader:
        assert "cache" in repr(loader) and "(4%), resized:96" in repr(loader)
        for _ in range(3):
            list(loader)
        assert loader.cache is not None
        tier = loader.cache.store.tier.stats()
        assert tier["payload_bytes"] <= tier["capacity_bytes"]
        assert tier["regions"]["main"]["budget"] == pytest.approx(0.04 * whole, rel=0.01)
        first, *later = loader.epoch_stats
        assert first.hits == 0 and first.bytes_from_source == whole
        for stats in later:
            assert stats.hits > 0.3 * NUM
            assert stats.bytes_from_source < whole * 0.75
            assert stats.hits + stats.fetched == NUM


# --- pixels ---

CACHE = Cache("100%", stage=STAGE)
WAYS: dict[str, dict[str, Any]] = {
    "1 thread": {"decode_threads": 1, "cache": CACHE},
    "2 workers": {"num_workers": 2, "cache": CACHE},
    "worker of its own": {
        "num_workers": 1,
        "multiprocessing_context": "forkserver",
        "cache": CACHE,
    },
    "a small cache": {"num_workers": 1, "cache": Cache("3%", stage=STAGE)},
    "nothing read ahead": {"cache": Cache("3%", stage=STAGE, prefetch=0)},
    "no cache": {"cache": Cache(0, stage=STAGE)},
}


def pixels(loader: Loader | Feed, epochs: int = 2) -> Iterator[np.ndarray]:
    with loader:
        for _ in range(epochs):
            for batch in loader:
                yield np.copy(np.asarray(batch.data if isinstance(batch, Batch) else batch[0]))


@pytest.fixture(scope="module")
def expected(root: Path) -> list[np.ndarray]:
    """The batches of the same files, resized beforehand."""
    sources = [bytes(FORM(stored()[number % len(stored())])) for number in range(NUM)]
    dataset = SampleDataset(MemorySource(sources), None, Train(64), np.zeros(NUM))
    return list(pixels(Loader(dataset, 8, cache=0, seed=3)))


@pytest.mark.parametrize("way", WAYS)
def test_pixels_do_not_depend_on_who_reads(
    root: Path, expected: list[np.ndarray], way: str
) -> None:
    dataset = ImageFolder(root, Train(64))
    found = list(pixels(Loader(dataset, 8, seed=3, **WAYS[way])))
    assert len(found) == len(expected) == 2 * -(-NUM // 8)
    for mine, theirs in zip(found, expected, strict=True):
        assert np.array_equal(mine, theirs)


def test_a_feed_gives_the_same(root: Path, expected: list[np.ndarray]) -> None:
    feed = Feed(root, 8, transform=Train(64), cache=CACHE, seed=3, decode_threads=2)
    for mine, theirs in zip(pixels(feed), expected, strict=True):
        assert np.array_equal(mine, theirs)


def test_the_disk_keeps_them_for_the_next_run(root: Path, tmp_path: Path) -> None:
    def run(stage: str = STAGE) -> Any:
        dataset = ImageFolder(root, Eval(96, 64))
        cache = Cache("5%", disk=tmp_path / "cache", stage=stage)
        with Loader(dataset, 10, cache=cache, epochs=1) as loader:
            list(loader)
            return loader.stats

    assert run().fetched == NUM
    again = run()
    assert again.hits == NUM and again.bytes_from_source == 0
    with pytest.raises(StateMismatch):
        run("resized:97")


@pytest.mark.parametrize("fetchers", [1, 2])
def test_objects_that_are_read_one_by_one_are_resized(
    root: Path, expected: list[np.ndarray], fetchers: int
) -> None:
    objects = ObjectSource((root / "class").as_uri())
    dataset = SampleDataset(objects, None, Train(64), np.zeros(NUM))
    cache = Cache("3%", stage=STAGE, fetchers=fetchers)
    with Loader(dataset, 8, seed=3, num_workers=1, cache=cache) as loader:
        found = [images.numpy().copy() for _ in range(2) for images, _ in loader]
        assert loader.stats.hits > 0 and loader.cache is not None
        assert loader.cache.store.totals()["read_ahead"] > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert np.array_equal(mine, theirs)


def test_a_sample_that_stays_too_large_is_read_each_time(root: Path) -> None:
    large = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (600, 900, 3), np.uint8)
    Image.fromarray(noise).save(large, "PNG")
    (root / "large.png").write_bytes(large.getvalue())
    files = FileSource([*sorted((root / "class").iterdir()), root / "large.png"])
    dataset = SampleDataset(files, decode_image, Eval(96, 64))
    with Loader(dataset, 8, cache=Cache("1MB", stage=STAGE), num_workers=1) as loader:
        for _ in range(3):
            assert sum(len(batch) for batch in loader) == NUM + 1
        last = loader.epoch_stats[-1]
        assert (last.hits, last.fetched) == (NUM, 1)
        assert last.bytes_from_source == len(large.getvalue())


@needs_server
@pytest.mark.filterwarnings("ignore:the pool:RuntimeWarning")
def test_another_node_finds_them_in_the_pool(root: Path) -> None:
    server = Server("--maxmemory-policy", "volatile-ttl", "--maxmemory", "100mb")

    def run(stage: str) -> Any:
        address = f"valkey://{server.name}?timeout=5"
        cache = Cache(0, pool=address, pool_size="50%", stage=stage)
        dataset = ImageFolder(root, Eval(96, 64))
        with Loader(dataset, 10, cache=cache, epochs=1) as loader:
            list(loader)
            return loader.stats

    try:
        assert run(STAGE).fetched == NUM
        again = run(STAGE)
        assert again.pool_hits == NUM and again.bytes_from_source == 0
        assert run("resized:97").fetched == NUM, "another form has other copies"
        assert run("encoded").fetched == NUM
    finally:
        server.close()


def test_jobs_of_one_stage_share_a_cache(root: Path) -> None:
    def loader(stage: str = STAGE) -> Loader:
        return Loader(ImageFolder(root, Train(64)), 8, seed=3, cache=Cache("100%", stage=stage))

    with loader() as first:
        list(first)
        with loader() as second, loader("resized:80") as other:
            for job in (second, other):
                list(job)
            assert (second.stats.hits, other.stats.hits) == (NUM, 0)


# --- what goes wrong ---


def test_what_does_not_decode_is_for_on_error() -> None:
    broken = photographs()[0][:3000]
    dataset = SampleDataset(MemorySource([*stored(), broken]), decode_image, transform=Eval(96, 64))
    with (
        Loader(dataset, 4, cache=CACHE) as loader,
        pytest.raises(SampleCorrupt, match="sample 7"),
    ):
        list(loader)
    with Loader(dataset, 4, cache=CACHE, on_error="skip") as loader:
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == 8
        assert [failure.id for failure in loader.quarantine] == [7]


def test_a_storage_that_gives_up_says_so() -> None:
    class Down(MemorySource):
        def read_packed(self, ids: Any) -> Any:
            raise SourceUnavailable("down", np.asarray(ids).tolist())

    with pytest.raises(SourceUnavailable, match="down"):
        Loader(SampleDataset(Down(stored())), cache=CACHE)


def test_files_are_read_ahead(root: Path) -> None:
    files = FileSource(sorted((root / "class").iterdir()))
    stage = make_stage(SampleDataset(files, decode_image), STAGE)
    assert stage.can_read_ahead
    assert not make_stage(SampleDataset(MemorySource(stored())), STAGE).can_read_ahead

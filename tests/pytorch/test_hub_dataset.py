"""wrap() of a ``datasets.Dataset``: the same samples as without it, in any format, cached."""

from __future__ import annotations

import importlib.util
import io
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.passing import passed_on

import stoker
from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound
from stoker.pytorch import hub_dataset
from stoker.pytorch.hub_dataset import HubDataset, _mean_bytes

# Imported where it is used, for it takes long and all workers of a run import this file.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None,
    reason="datasets is not installed: pip install 'stoker[huggingface]'",
)
N = 60


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A data set on disk, in three files."""
    import datasets

    folder = tmp_path_factory.mktemp("hub")
    rows = {
        "n": list(range(N)),
        "data": [bytes([i]) * i for i in range(N)],
        "text": [f"å{i}" for i in range(N)],
        "box": [[float(i)] * (i % 4) for i in range(N)],
        "about": [{"a": i, "b": [str(i)]} for i in range(N)],
        "nothing": [None if i % 3 else i for i in range(N)],
    }
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).save_to_disk(folder, num_shards=3)
    yield datasets.load_from_disk(folder)


def double(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"z": [2 * value for value in batch["n"]]}


VIEWS: dict[str, Any] = {
    "plain": lambda d: d,
    "shuffled": lambda d: d.shuffle(seed=1),
    "selected": lambda d: d.shuffle(seed=2).select(range(7, 50)),
    "filtered": lambda d: d.filter(lambda row: row["n"] % 2 == 0),
    "torch": lambda d: d.select_columns(["n", "box"]).with_format("torch"),
    "numpy": lambda d: d.with_format("numpy", columns=["n"]),
    "all columns": lambda d: d.with_format("torch", columns=["n"], output_all_columns=True),
    "transform": lambda d: d.with_transform(double),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.exact(
    "Hugging Face `datasets`", "rows as the data set gives them, by each format, transform and view"
)
@pytest.mark.parametrize("view", VIEWS)
def test_samples_are_those_of_the_data_set(plain: Any, view: str) -> None:
    dataset = VIEWS[view](plain)
    wrapped = stoker.wrap(dataset)
    assert isinstance(wrapped, HubDataset)
    assert len(wrapped) == len(dataset)
    assert wrapped.is_random == (view == "transform")
    for index in range(len(dataset)):
        assert same(wrapped[index], dataset[index])


@pytest.mark.exact("Hugging Face `datasets`", "images are decoded after the cache")
def test_images_are_decoded_after_the_cache(tmp_path: Path) -> None:
    import datasets

    file = io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(file, "PNG")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(2)})
    rows = {"image": [{"bytes": file.getvalue(), "path": None}] * 4, "label": [0, 1, 0, 1]}
    wrapped = stoker.wrap(datasets.Dataset.from_dict(rows, features=features))
    assert file.getvalue() in wrapped.source.read([2])[0]
    sample = wrapped[1]
    assert (sample["image"].size, sample["label"]) == ((3, 2), 1)
    assert wrapped.features == features


@pytest.mark.exact("Hugging Face `datasets`", "images of which the table has the path are cached")
def test_images_in_files_are_cached(tmp_path: Path) -> None:
    """As load_dataset("imagefolder") has them."""
    import datasets

    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for number, path in enumerate(paths):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    rows = {"image": [None, *map(str, paths)]}
    features = datasets.Features({"image": datasets.Image()})
    dataset = datasets.Dataset.from_dict(rows, features=features)
    wrapped = stoker.wrap(dataset)
    size = len(paths[1].read_bytes())
    assert size < wrapped.source.sizes[0] < size + 2000, "one was read to know"
    before = [dataset[index]["image"] for index in range(5)]
    read = wrapped.source.read(range(5))
    for path in paths:
        path.unlink()
    after = [
        wrapped.finish(index, wrapped.decode(memoryview(row))) for index, row in enumerate(read)
    ]
    assert after[0]["image"] is before[0] is None
    for sample, image in zip(after[1:], before[1:], strict=True):
        assert np.array_equal(np.asarray(sample["image"]), np.asarray(image))
    with pytest.raises(SampleNotFound, match=r"Dataset\[2\]: .*1\.png"):
        wrapped.source.read([2])
    with pytest.raises(ConfigError, match=r"2\.png"):
        stoker.wrap(dataset.select([3]))
    assert stoker.wrap(dataset, sample_bytes=7).source.sizes[0] == 7


def test_nothing_is_read_to_wrap(plain: Any) -> None:
    calls: list[Any] = []

    def spy(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        calls.append(batch)
        return batch

    stoker.wrap(plain.with_transform(spy))
    assert not calls


def test_a_transform_beside_takes_the_sample(plain: Any) -> None:
    wrapped = stoker.wrap(plain)
    wrapped.transform = lambda sample: sample["n"] + 1
    assert wrapped[4] == 5 and wrapped.is_random


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_with_the_loader(plain: Any, workers: int) -> None:
    dataset = plain.shuffle(seed=3).select_columns(["n"]).with_format("torch")
    wrapped = stoker.wrap(dataset, name=f"numbers-{workers}")
    with stoker.Loader(wrapped, batch_size=8, num_workers=workers, cache="50%") as loader:
        for _ in range(2):
            seen = torch.cat([batch["n"] for batch in loader])
            assert sorted(seen.tolist()) == list(range(N))


def test_it_pickles_for_workers(plain: Any) -> None:
    wrapped = stoker.wrap(plain.shuffle(seed=1))
    wrapped[0]
    assert same(passed_on(wrapped)[5], wrapped[5])


def test_sizes_are_about_right(plain: Any) -> None:
    source = stoker.wrap(plain).source
    total = sum(map(len, source.read(range(N))))
    assert total / 2 < source.sizes.sum() < 2 * total


def test_few_batches_tell_how_long_rows_are(tmp_path: Path) -> None:
    """Of a file on slow storage each is a read: with thousands of them, minutes."""
    import datasets

    rows = datasets.Dataset.from_dict({"data": [bytes(10 * (i % 7)) for i in range(3000)]})
    rows.save_to_disk(tmp_path / "one", max_shard_size="4KB")
    rows = datasets.load_from_disk(tmp_path / "one")
    batches = rows.data.to_batches()
    assert len(batches) > 40
    asked: list[int] = []

    class Counted:
        def __init__(self, batch: Any) -> None:
            self.num_rows, self._batch = batch.num_rows, batch

        @property
        def nbytes(self) -> int:
            asked.append(self.num_rows)
            return int(self._batch.nbytes)

    found = _mean_bytes([Counted(batch) for batch in batches])
    assert len(asked) <= 32
    assert found == pytest.approx(rows.data.nbytes / 3000, rel=0.1)


def test_rows_of_mapped_files_are_asked_for_before_they_are_touched(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        hub_dataset, "_madvise", lambda address, length, _: asked.append((address, length))
    )
    stoker.wrap(plain.with_format("numpy")).source.read([50, 3, 51])
    assert all(address % mmap.PAGESIZE == 0 and length > 0 for address, length in asked)
    batches = plain.data.to_batches()
    for batch, is_read in zip(batches, (True, False, True), strict=True):
        for buffer in batch.column(0).buffers() + batch.column(1).buffers():
            if buffer is not None:
                last = buffer.address + buffer.size - 1
                covered = any(begin <= last < begin + length for begin, length in asked)
                assert covered == is_read
    asked.clear()
    stoker.wrap(plain.map(keep_in_memory=True)).source.read([50, 3, 51])
    assert asked == []


def test_long_rows_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they begin is not known before they are touched: what is read would be another's."""
    import datasets

    rows = {"data": [bytes(1000), bytes(10**6), bytes(100), bytes(2 * 10**6)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "long")
    long = datasets.load_from_disk(tmp_path / "long")
    asked: list[int] = []
    monkeypatch.setattr(hub_dataset, "_madvise", lambda _, length, __: asked.append(length))
    stoker.wrap(long).source.read(range(4))
    assert sum(asked) < 1000  # where the rows begin


def test_bytes_of_others_are_corrupt_samples(plain: Any) -> None:
    wrapped = stoker.wrap(plain)
    good = wrapped.source.read([3])[0]
    for bad in (b"", b"nonsense" * 20, good[:50], good[: len(good) // 2]):
        with pytest.raises(SampleCorrupt, match="no row of the data set"):
            wrapped.decode(memoryview(bad))


def test_what_cannot_be_cached_by_row_is_wrapped_as_any_other(plain: Any) -> None:
    import datasets

    class Own(datasets.Dataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__(key)["n"]

    own = Own(plain.data, info=plain.info)
    wrapped = stoker.wrap(own)
    assert not isinstance(wrapped, HubDataset) and wrapped[4] == 4
    with pytest.raises(ConfigError, match="0 samples"):
        stoker.wrap(plain.select([]))
    with pytest.raises(ConfigError, match="map-style"):
        stoker.wrap(plain.to_iterable_dataset())

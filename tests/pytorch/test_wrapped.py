from __future__ import annotations

import os
import random
import threading
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.parts import Squares, images, number_of, numbers
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

from stoker import Cache
from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound
from stoker.pytorch import Loader, SampleDataset, wrap, wrapped
from stoker.pytorch.wrapped import same
from stoker.shared import SharedArray


def plus_noise(image: Any) -> Any:
    return torch.from_numpy(image).double() + torch.rand(1).double() + random.random()


def negative(target: int) -> int:
    return -target


def epoch(loader: Loader) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for batch, _ in loader:
        found |= zip(loader.last_ids.tolist(), batch, strict=True)
    return found


def test_the_cache_comes_before_the_transforms() -> None:
    original = Squares(40, plus_noise, negative)
    dataset = wrap(original)
    original.reads = 0
    with Loader(dataset, batch_size=8, cache="100%") as loader:
        first, second = epoch(loader), epoch(loader)
        assert loader.epoch_stats[1].hits == 40
    for index in range(40):
        noise = [float(found[index][0, 0]) - index**2 for found in (first, second)]
        assert min(noise) >= 0 and max(noise) < 2
        assert noise[0] != noise[1]  # augmentation goes on
    assert original.transform is plus_noise  # the user's own data set is as it was
    assert dataset[3][1] == -1
    assert dataset.classes == ["even", "odd"]


def test_generators_are_left_alone() -> None:
    state = random.getstate()
    wrap(Squares(40, plus_noise))
    assert random.getstate() == state


def test_joint_transforms_as_torchvision_has_them() -> None:
    class Joint(Squares):
        def __init__(self) -> None:
            super().__init__()
            self.transforms: Any = lambda image, target: (image + target, target * 10)

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            sample = super().__getitem__(index)
            return self.transforms(*sample) if self.transforms is not None else sample

    dataset = wrap(Joint())
    image, target = dataset[3]
    assert (int(image[0, 0]), target) == (10, 10)
    assert dataset.is_random


def test_samples_that_are_no_tuples_are_transformed_whole() -> None:
    class Alone(Squares):
        def __getitem__(self, index: int) -> Any:
            value = torch.full((2,), float(index))
            return value if self.transform is None else self.transform(value)

    assert wrap(Alone(transform=torch.neg))[3].tolist() == [-3, -3]


Pair = namedtuple("Pair", "image target")


def test_named_tuples_stay_named() -> None:
    class Named(Squares):
        def __getitem__(self, index: int) -> Any:
            return Pair(*super().__getitem__(index))

    sample = wrap(Named(transform=np.negative))[2]
    assert type(sample) is Pair and int(sample.image[0, 0]) == -4


class Fresh(Dataset[Any]):
    """Other samples with each read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return random.SystemRandom().getrandbits(60)


@pytest.mark.parametrize("workers", [0, 1])
def test_hidden_randomness_is_refused_unless_vouched_for(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 8, "cache": "100%", "num_workers": workers}
    with Loader(wrap(Fresh()), **options) as loader:
        assert len(list(loader)) == 5, "nothing comes from the cache yet"
        with pytest.raises(ConfigError, match="differs from one read to the next"):
            list(loader)
    with Loader(wrap(Fresh(), deterministic=True), **options) as loader:
        epochs = [torch.cat(list(loader)) for _ in range(2)]
    assert torch.equal(epochs[0].sort()[0], epochs[1].sort()[0])  # frozen, as vouched for


def test_the_transforms_under_a_subset_come_after_the_cache() -> None:
    """They were cached with the samples, which the second epoch found to differ."""
    part, _ = random_split(Squares(40, plus_noise, negative), [10, 30])
    dataset = wrap(Subset(part, [9, 0, 1, 1]), name="squares")
    assert isinstance(dataset, Subset) and isinstance(dataset.dataset, Subset)
    with Loader(dataset, batch_size=2, cache="100%") as loader:
        epochs = [epoch(loader) for _ in range(3)]
        assert loader.epoch_stats[1].hits == 4
    for found in epochs:
        assert found.keys() == {part.indices[index] for index in (9, 0, 1)}
        for index, image in found.items():
            assert 0 <= float(image[0, 0]) - index**2 < 2
    assert any(not torch.equal(epochs[0][index], epochs[1][index]) for index in epochs[0])
    with pytest.raises(ConfigError, match=r"WrappedDataset needs no wrap\(\)"):
        wrap(Subset(wrap(Squares(40)), [1]))


def test_transforms_that_cannot_be_replaced_are_refused() -> None:
    class Three(Squares):
        """As timm's AugMixDataset, which takes three transforms and no other number."""

        @property  # type: ignore[override]
        def transform(self) -> Any:
            return plus_noise

        @transform.setter
        def transform(self, value: Any) -> None:
            assert value is None, "three transforms"

    with pytest.raises(ConfigError, match=r"Three .* its `transform` be replaced .*three tr"):
        wrap(Three(40))


class Counted(Dataset[Any]):
    """Counts the calls of each sample, and those in the process that made it."""

    def __init__(self) -> None:
        self.calls = SharedArray.create(41, np.int64, "calls")
        self.home = os.getpid()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        self.calls.array[index] += 1
        self.calls.array[40] += os.getpid() == self.home
        return index


def test_wrap_reads_one_sample_once_and_in_another_process() -> None:
    dataset = Counted()
    wrap(dataset)
    assert dataset.calls.array.tolist() == [0] * 20 + [1] + [0] * 20
    assert wrap(dataset, sample_bytes=64).source.sizes.tolist() == [64] * 40
    assert dataset.calls.array.sum() == 1
    with pytest.raises(ConfigError, match="sample_bytes=0"):
        wrap(dataset, sample_bytes=0)


def test_a_sample_is_read_at_most_once_a_visit() -> None:
    dataset = Counted()
    with Loader(wrap(dataset, sample_bytes=64), batch_size=8, cache="100%") as loader:
        for _ in range(3):
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))
    calls = dataset.calls.array[:40]
    assert calls.max() <= 2 and calls.sum() == 40 + 16, "the first hits are held against it"


class Stuck(Counted):
    def __getitem__(self, index: int) -> int:
        threading.Event().wait()
        return index


class Ending(Counted):
    def __getitem__(self, index: int) -> int:
        os._exit(3)


def test_a_first_sample_that_does_not_come_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapped, "_PATIENCE", 0.2)
    with pytest.raises(ConfigError, match=r"Stuck\[20\] did not come within .* sample_bytes="):
        wrap(Stuck())
    monkeypatch.setattr(wrapped, "_PATIENCE", 60.0)
    with pytest.raises(ConfigError, match=r"Ending\[20\] ended its process with 3"):
        wrap(Ending())


def test_transforms_that_cannot_be_moved_are_refused() -> None:
    class Dictionary(Squares):
        def __getitem__(self, index: int) -> Any:
            image, target = super().__getitem__(index)
            return {"image": image, "target": target}

    class Keyword(Squares):
        def __getitem__(self, index: int) -> Any:
            assert self.transform is not None
            return self.transform(image=np.full(3, index))["image"], 0

    class OwnOrder(Squares):
        def __getitem__(self, index: int) -> Any:
            image, target = super().__getitem__(index)
            return target, image

    with pytest.raises(ConfigError, match="of what wrap"):
        wrap(Dictionary(transform=np.negative))
    with pytest.raises(ConfigError, match="without its transforms"):
        wrap(Keyword(transform=lambda image: {"image": image}))
    with pytest.raises(ConfigError, match="is not its cached sample"):
        wrap(OwnOrder(transform=np.negative))
    by_hand = wrap(Dictionary())
    by_hand.transform = lambda sample: sample["target"]
    assert by_hand[3] == 1


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class _NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (_Stream(), "tar shards"),
        (_NoLength(), "needs __len__"),
        (Squares(0), "0 samples"),
        (SampleDataset(numbers(3), number_of), "needs no wrap"),
    ],
)
def test_data_sets_that_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrap(dataset)


def test_names_decide_who_shares() -> None:
    def key(name: str | None, length: int = 40) -> str:
        return wrap(Squares(length), name=name).source.fingerprint

    assert key("train") == key("train") != key("test")
    assert key("train") != key("train", 41)
    assert key(None) != key(None)
    with pytest.raises(ConfigError, match="name=''"):
        key("")


def test_views_of_large_tensors_are_cached_as_small_samples() -> None:
    dataset = wrap(TensorDataset(torch.arange(100_000.0).reshape(1000, 100), torch.arange(1000)))
    assert 400 < dataset.source.sizes[0] < 1000
    row, number = dataset[7]
    assert torch.equal(row, torch.arange(700.0, 800.0)) and number == 7


def test_errors_of_the_data_set_are_errors_of_a_sample() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise FileNotFoundError("gone.jpg")
            if index == 4:
                raise KeyError("label")
            return super().__getitem__(index)

    dataset = wrap(Broken(100, np.negative))
    with pytest.raises(SampleNotFound, match=r"Broken\[3\]: gone.jpg"):
        dataset[3]
    with pytest.raises(SampleCorrupt, match=r"Broken\[4\] raised KeyError"):
        dataset[4]
    with Loader(dataset, batch_size=10, on_error="skip", cache=0) as loader:
        assert sum(len(y) for _, y in loader) == 100
        assert sorted(failure.id for failure in loader.quarantine) == [3, 4]


def test_decoded_stage_is_refused(image_root: Any) -> None:
    with pytest.raises(ConfigError, match="no meaning for a wrapped"):
        Loader(wrap(Squares()), cache=Cache(stage="decoded"))
    with pytest.raises(ConfigError, match="stage='raw'"):
        Loader(images(image_root), cache=Cache(stage="raw"))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.zeros(2), torch.ones(2)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.ones(2)),
        ((1, 2), [1, 2]),
        ((1, 2), (1, 2, 3)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        (1, 1.0),
        (Image.new("RGB", (2, 2)), Image.new("RGB", (2, 2), (0, 0, 1))),
    ],
)
def test_differences_are_seen(left: Any, right: Any) -> None:
    assert not same(left, right)
    assert same(left, left) and same(right, right)


def test_nan_equals_nan() -> None:
    assert same(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    assert same(np.array([float("nan")]), np.array([float("nan")]))

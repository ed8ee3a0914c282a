from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.images import NUM_IMAGES
from support.parts import ids_in, images, number_of, numbers, with_noise
from torch.utils.data import DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from stoker import Cache
from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SegmentError
from stoker.jobs import Sharing
from stoker.pytorch import CachedDataset, ImageFolder, SampleDataset, with_cache
from stoker.pytorch.dataset import DatasetPopulation
from stoker.source import MemorySource, Pace


def test_image_folder_looks_like_torchvisions(image_root: Path) -> None:
    dataset = ImageFolder(image_root)
    assert len(dataset) == NUM_IMAGES
    assert dataset.classes == ["class0", "class1", "class2"]
    assert dataset.class_to_idx == {"class0": 0, "class1": 1, "class2": 2}
    assert dataset.targets.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    image, target = dataset[21]
    assert isinstance(image, Image.Image)
    assert (image.mode, image.size, image.getpixel((3, 3))) == ("RGB", (8, 8), (21, 21, 21))
    assert target == 1 and type(target) is int
    assert dataset[-1][1] == 2
    with pytest.raises(IndexError):
        dataset[NUM_IMAGES]


def test_image_folder_transforms_and_outputs(image_root: Path) -> None:
    as_array = ImageFolder(
        image_root, transform=lambda pixels: pixels.sum(), target_transform=str, output="array"
    )
    assert as_array[2] == (2 * 8 * 8 * 3, "0")
    assert as_array.is_random and not ImageFolder(image_root).is_random
    lengths = ImageFolder(image_root, decode=len)
    assert lengths[5] == (int(lengths.source.sizes[5]), 0)


def test_a_batch_is_one_read(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ImageFolder(image_root, output="array")
    calls = []
    read = dataset.source.read_packed
    monkeypatch.setattr(
        dataset.source, "read_packed", lambda ids: (calls.append(len(ids)), read(ids))[1]
    )
    assert [int(image[0, 0, 0]) for image, _ in dataset.__getitems__([5, 3, 5])] == [5, 3, 5]
    assert calls == [3]


def test_it_works_in_a_plain_torch_loader(image_root: Path) -> None:
    dataset = Subset(ImageFolder(image_root, transform=np.array), range(0, 60, 3))
    found = [int(i) for batch, _ in DataLoader(dataset, batch_size=8) for i in batch[:, 0, 0, 0]]
    assert found == list(range(0, 60, 3))


@pytest.mark.parametrize(
    ("root", "message"),
    [("http://host/train", "web servers do not list"), ("/nowhere/at/all", "/nowhere/at/all")],
)
def test_roots_that_are_refused(root: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImageFolder(root)


def test_options_that_are_refused(image_root: Path) -> None:
    with pytest.raises(ConfigError, match="output='tensor'"):
        ImageFolder(image_root, output="tensor")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no meaning with decode"):
        ImageFolder(image_root, output="array", decode=len)
    with pytest.raises(ConfigError, match="storage_options have no meaning"):
        ImageFolder(image_root, storage_options={"region": "x"})
    with pytest.raises(ConfigError, match="pace have no meaning"):
        ImageFolder(image_root, pace=Pace())


def test_damaged_and_vanished_images_are_named(own_images: Path) -> None:
    dataset = ImageFolder(own_images)
    victim = own_images / "class0" / "003.png"
    raw = victim.read_bytes()
    victim.write_bytes(raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2))
    with pytest.raises(SampleCorrupt, match=r"003\.png"):
        dataset[3]
    victim.unlink()
    with pytest.raises(SampleNotFound, match=r"003\.png"):
        dataset[3]
    assert dataset[4][1] == 0


def test_sample_dataset() -> None:
    plain = SampleDataset(numbers(3))
    assert plain[1] == b"00000001."
    assert not plain.is_random and plain.targets is None
    full = SampleDataset(numbers(3), number_of, transform=float, targets=[0.5, 1.5, 2.5])
    assert full[2] == (2.0, 2.5)
    vectors = SampleDataset(numbers(3), number_of, targets=np.eye(3))
    assert vectors[1][1].tolist() == [0, 1, 0]
    vectors[1][1][:] = 7
    assert vectors[1][1].tolist() == [0, 1, 0]


def test_what_decode_raises_is_a_corrupt_sample() -> None:
    dataset = SampleDataset(MemorySource([b"00000001", b"x"]), number_of)
    with pytest.raises(SampleCorrupt, match=r"sample 1 .*decode raised ValueError"):
        dataset[1]
    assert dataset[0] == 1


@pytest.mark.parametrize("targets", [[1, 2], 5, ["a", "b", "c"]])
def test_targets_that_are_refused(targets: object) -> None:
    with pytest.raises(ConfigError, match="targets of"):
        SampleDataset(numbers(3), targets=targets)  # type: ignore[arg-type]


def base() -> SampleDataset:
    return SampleDataset(numbers(20), number_of)


def test_the_whole_data_set() -> None:
    population = DatasetPopulation(base())
    assert (len(population), population.label) == (20, "")
    assert population.ids(np.array([3, -1])).tolist() == [3, 19]
    assert population.sizes(population.base.source.sizes).shape == (20,)


def test_nested_subsets_and_repeats() -> None:
    dataset = base()
    population = DatasetPopulation(Subset(Subset(dataset, [5, 6, 7, 7, -1]), [4, 0, 2, 3]))
    assert population.base is dataset
    assert population.ids(np.arange(4)).tolist() == [19, 5, 7, 7]
    assert population.ids(np.array([-1, 0])).tolist() == [7, 19]
    sizes = dataset.source.sizes
    assert population.sizes(sizes).tolist() == sizes[[5, 7, 19]].tolist()
    with pytest.raises(ConfigError, match="from 0 to 4"):
        population.ids(np.array([0, 4]))


def test_labels_tell_subsets_apart() -> None:
    labels = {DatasetPopulation(Subset(base(), part)).label for part in ([1, 2], [2, 1], range(20))}
    assert len(labels) == 3 and "" not in labels
    assert DatasetPopulation(Subset(base(), [1, 2])).label in labels


# torchdata 0.11 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("stage", ["encoded", "decoded"])
def test_in_the_loaders_of_others(image_root: Path, make: Any, workers: int, stage: str) -> None:
    dataset = with_cache(images(image_root), Cache("100%", stage=stage))
    loader = make(Subset(dataset, range(0, 60, 2)), batch_size=8, num_workers=workers)
    for _ in range(2):
        found = [i for batch, _ in loader for i in ids_in(batch)]
        assert found == list(range(0, 60, 2))
    stats = dataset.store.stats()
    assert (stats["fetched"], stats["hits"]) == (30, 30)
    dataset.close()


def test_in_workers_of_another_start_method(image_root: Path) -> None:
    dataset = with_cache(images(image_root), "100%")
    loader = DataLoader(
        dataset,
        batch_size=8,
        num_workers=2,
        multiprocessing_context="forkserver",
        persistent_workers=True,
    )
    for _ in range(2):
        assert sorted(i for batch, _ in loader for i in ids_in(batch)) == list(range(60))
    assert dataset.store.stats()["hits"] == 60
    del loader
    dataset.close()


def test_stateful_data_loader_resumes_over_the_cache(image_root: Path) -> None:
    dataset = with_cache(images(image_root), "100%")
    loader = StatefulDataLoader(dataset, batch_size=8, num_workers=2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    expected = [ids_in(batch) for batch, _ in iterator]
    again = StatefulDataLoader(dataset, batch_size=8, num_workers=2)
    again.load_state_dict(state)
    assert [ids_in(batch) for batch, _ in again] == expected
    dataset.close()


def test_threads_share_it() -> None:
    dataset = with_cache(SampleDataset(numbers(200), number_of), "30%", recipe="lru")
    orders = [np.random.default_rng(seed).permutation(200) for seed in range(8)]

    def read(order: Any) -> bool:
        parts = [dataset.__getitems__(order[i : i + 20]) for i in range(0, 200, 20)]
        return [number for part in parts for number in part] == order.tolist()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, orders))
    assert dataset.store.stats()["accesses"] == 1600
    dataset.close()


def test_one_sample(image_root: Path) -> None:
    dataset = with_cache(images(image_root), "50%")
    assert len(dataset) == 60
    assert int(dataset[-1][0][0, 0, 0]) == 59
    with pytest.raises(IndexError, match="index 60"):
        dataset[60]
    dataset.close()
    with pytest.raises(SegmentError):
        dataset[0]


def test_transforms_come_after_the_cache(image_root: Path) -> None:
    for stage in ("encoded", "decoded"):
        dataset = with_cache(images(image_root, with_noise), Cache("100%", stage=stage))
        assert not torch.equal(dataset[5][0], dataset[5][0])
        dataset.close()


def test_what_cannot_be_decoded_is_named() -> None:
    dataset = with_cache(SampleDataset(MemorySource([b"00000000", b"?" * 8]), number_of), "100%")
    assert isinstance(dataset, CachedDataset)
    with pytest.raises(SampleCorrupt, match="sample 1"):
        dataset.__getitems__([0, 1])
    assert dataset.__getitems__([0, 0]) == [0, 0]
    dataset.close()


def test_two_caches_of_the_same_samples_are_one(image_root: Path) -> None:
    first, second = (with_cache(images(image_root), "100%") for _ in "ab")
    list(first.__getitems__(range(60)))
    list(second.__getitems__(range(60)))
    assert second.store.stats()["hits"] == 60
    with pytest.warns(RuntimeWarning, match="a running job's cache"):
        third = with_cache(images(image_root), "50%")
    decoded = with_cache(images(image_root), Cache("100%", stage="decoded"))
    list(decoded.__getitems__(range(60)))
    assert decoded.store.stats()["hits"] == 0
    for one in (first, second, third, decoded):
        one.close()


def test_it_refuses_what_the_loader_refuses(image_root: Path) -> None:
    with pytest.raises(ConfigError, match="120%"):
        with_cache(images(image_root), "120%")


@pytest.mark.parametrize(
    ("name", "value"),
    [("prefetch", "1MiB"), ("fetchers", 2), ("locality", False), ("sharing", Sharing("mine"))],
)
def test_it_refuses_what_would_be_ignored(image_root: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* needs the Loader"):
        with_cache(images(image_root), Cache(**{name: value}))

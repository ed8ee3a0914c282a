"""ImageFolder over an object store, through the Loader: workers, prefetch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.images import NUM_IMAGES
from support.parts import ids_in, images
from support.s3 import Bucket

from stoker import Cache
from stoker.errors import ConfigError
from stoker.pytorch import ImageFolder, Loader
from stoker.source import ImagePrefixSource


@pytest.fixture
def filled(bucket: Bucket, image_root: Path) -> Bucket:
    """A bucket with the images of ``image_root`` below ``train/``."""
    files = [path for path in image_root.rglob("*") if path.is_file()]
    bucket.put({f"train/{file.relative_to(image_root)}": file.read_bytes() for file in files})
    return bucket


def test_it_is_the_local_folder(filled: Bucket, image_root: Path) -> None:
    local = ImageFolder(image_root, np.array)
    remote = ImageFolder(f"{filled.url}/train", np.array, storage_options=filled.options())
    assert isinstance(remote.source, ImagePrefixSource)
    assert remote.root == f"{filled.url}/train"
    assert remote.classes == local.classes
    assert remote.targets.tolist() == local.targets.tolist()
    for (image, target), (expected, label) in zip(
        remote.__getitems__([59, 0, 21]), local.__getitems__([59, 0, 21]), strict=True
    ):
        assert (image == expected).all() and target == label


@pytest.mark.parametrize("prefetch", [0, "256MiB"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_reads_each_object_once(
    filled: Bucket, num_workers: int, prefetch: int | str
) -> None:
    dataset = images(f"{filled.url}/train", storage_options=filled.options())
    with Loader(
        dataset,
        batch_size=8,
        cache=Cache("100%", prefetch=prefetch),
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        epochs=2,
    ) as loader:
        for _ in range(2):
            seen = [(i, t) for x, y in loader for i, t in zip(ids_in(x), y.tolist(), strict=True)]
            assert sorted(seen) == [(i, i // 20) for i in range(NUM_IMAGES)]
        assert (loader.stats.fetched, loader.stats.hits) == (NUM_IMAGES, NUM_IMAGES)


def test_a_parent_that_has_read_may_fork_workers(filled: Bucket) -> None:
    dataset = images(f"{filled.url}/train", storage_options=filled.options())
    assert int(dataset[7][0][0, 0, 0]) == 7
    with Loader(
        dataset, batch_size=8, cache=0, num_workers=2, multiprocessing_context="fork"
    ) as loader:
        assert sorted(i for x, _ in loader for i in ids_in(x)) == list(range(NUM_IMAGES))


def test_an_empty_prefix_is_refused(filled: Bucket) -> None:
    with pytest.raises(ConfigError, match=f"{filled.url}/nothing"):
        ImageFolder(f"{filled.url}/nothing", storage_options=filled.options())

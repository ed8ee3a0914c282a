"""`stoker pack`: what a Loader gets from the shards is what it gets from the folders."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from images.photographs import photographs
from support.s3 import Bucket

from stoker import Cache, ImageFolder, Loader
from stoker.cli.root import root
from stoker.errors import SampleNotFound
from stoker.images import Eval
from stoker.source import open_source
from stoker.source.base import without
from stoker.source.image_folder import ImageFolderSource


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(root, list(map(str, arguments)), terminal_width=200)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for number, photograph in enumerate(photographs()):
        path = tmp_path / "images" / f"class {number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photograph)
    return tmp_path / "images"


def served(root: Path) -> Counter[tuple[bytes, int]]:
    dataset = ImageFolder(root, transform=Eval(32, 32))
    with Loader(dataset, batch_size=4, cache=Cache("50%"), recipe="foresight") as loader:
        epochs = [
            Counter(
                (image.numpy().tobytes(), int(label))
                for images, labels in loader
                for image, label in zip(images, labels, strict=True)
            )
            for _ in range(2)
        ]
    assert epochs[0] == epochs[1]
    return epochs[0]


def test_a_loader_gets_the_same_images_with_the_same_labels(folders: Path, tmp_path: Path) -> None:
    command = ["pack", folders, tmp_path / "packed", "--image-folder", "--shard-size", "200KiB"]
    assert "6 samples are in" in run(*command)
    assert served(tmp_path / "packed") == served(folders)
    told = json.loads(run(*command, "--json"))
    assert told["present"] == told["samples"] == 6 and told["left_out"] == {}
    assert all(Path(shard).is_file() for shard in told["shards"])


def test_what_is_left_out_is_said(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ImageFolderSource.read_packed

    def spoilt(self, ids):
        data, offsets, errors = read(self, ids)
        gone = {row: SampleNotFound("is gone") for row, id_ in enumerate(ids.tolist()) if id_ == 4}
        return without({**errors, **gone}, data, offsets)

    monkeypatch.setattr(ImageFolderSource, "read_packed", spoilt)
    command = ["pack", folders, tmp_path / "packed", "--image-folder"]
    assert "is gone" in run(*command, status=1)
    said = run(*command, "--leave-out", status=1)
    assert "5 samples are in 1 shard " in said and "class 2/2.jpg: is gone" in said
    assert len(ImageFolder(tmp_path / "packed")) == 5


def test_a_bucket_is_packed_into(folders: Path, bucket: Bucket) -> None:
    names = [f"--to-option={name}={value}" for name, value in bucket.options().items()]
    said = run("pack", folders, f"{bucket.url}/packed", "--shard-size", "200KiB", *names)
    (pattern,) = re.findall(r"s3://\S+\.tar", said)
    source = open_source(pattern, storage_options=bucket.options())
    assert len(source) == 6 and pattern.startswith(f"{bucket.url}/packed/shard-{{000000..")
    assert "--to-option" in run("pack", folders, bucket.url, "--to-option", "x", status=1)


def test_errors(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    assert "not empty" in run("pack", folders, tmp_path / "full", status=1)
    assert "--shard-size" in run("pack", folders, tmp_path / "x", "--shard-size", "7q", status=1)

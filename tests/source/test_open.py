"""open_source picks the class by the address."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import fsspec
import pytest

from stoker.errors import ConfigError
from stoker.source import (
    FileSource,
    FsspecSource,
    ImageFolderSource,
    ImagePrefixSource,
    ObjectSource,
    ShardSource,
    open_image_folder,
    open_source,
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"meow")
    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as archive:
            info = tarfile.TarInfo("a.x")
            archive.addfile(info, io.BytesIO())
    return tmp_path


def test_the_class_is_picked_by_the_address(data: Path) -> None:
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pipe("/top/cat/1.jpg", b"meow")
    image = data / "images" / "cat" / "1.jpg"
    for where, kind in (
        (data / "images", ImageFolderSource),
        (str(image), FileSource),
        ([image, image], FileSource),
        (f"{data}/{{0..1}}.tar", ShardSource),
        ([data / "0.tar"], ShardSource),
        (f"file://{data}/{{0..1}}.tar", ShardSource),
        (f"file://{data}/images", ObjectSource),
        ("memory://top", FsspecSource),
    ):
        assert type(open_source(where)) is kind
    assert isinstance(open_image_folder(data / "images"), ImageFolderSource)
    for address in (f"file://{data}/images", "memory://top"):
        source = open_image_folder(address)
        assert isinstance(source, ImagePrefixSource)
        assert (source.classes, source.read([0])) == (("cat",), [b"meow"])


def test_options_go_to_the_class(data: Path) -> None:
    assert open_source(data / "0.tar", part="x").read([0]) == [b""]
    with pytest.raises(ConfigError, match=r"ShardSource.*nonsense"):
        open_source(data / "0.tar", nonsense=1)


def test_what_cannot_be_opened_is_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match="empty"):
        open_source([])
    with pytest.raises(ConfigError, match="ObjectSource the common address"):
        open_source(["s3://b/1.jpg", "s3://b/2.jpg"])
    with pytest.raises(ConfigError, match="is compressed"):
        open_source("s3://b/x.tar.gz")

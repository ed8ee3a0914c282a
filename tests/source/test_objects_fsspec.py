"""FsspecSource: file systems that only fsspec knows."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound
from stoker.source import FsspecSource, Pace, Retry, Source
from stoker.testing import SourceConformance

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class TestFsspecSource(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        for number, sample in enumerate(samples):
            (tmp_path / f"{number:04d}.bin").write_bytes(sample)
        return FsspecSource(f"local://{tmp_path}")


@pytest.fixture
def memory() -> fsspec.AbstractFileSystem:
    files = fsspec.filesystem("memory")
    files.store.clear()
    return files


def test_files_in_memory(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe({"/data/b/1": b"one", "/data/a": b"two", "/other": b"x"})
    source = FsspecSource("memory://data")
    assert source.read([0, 1]) == [b"two", b"one"]
    assert [source.name(i) for i in (0, 1)] == ["memory:///data/a", "memory:///data/b/1"]
    assert FsspecSource("memory://data", ["b/1"]).read([0]) == [b"one"]


def test_files_that_change_are_found_out_by_size(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe({"/d/a": b"one", "/d/b": b"two", "/d/c": b"three"})
    source = FsspecSource("memory://d", pace=Pace(retry=Retry(deadline=0.2)))
    memory.pipe("/d/a", b"longer")
    memory.rm("/d/b")
    _, errors = source.read_each([0, 1, 2])
    assert {index: type(error) for index, error in errors.items()} == {
        0: SampleCorrupt,
        1: SampleNotFound,
    }


def test_bad_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match="no-such-scheme"):
        FsspecSource("no-such-scheme://x")
    with pytest.raises(ConfigError, match="no objects"):
        FsspecSource("memory://nothing/here")
    with pytest.raises(ConfigError, match="fsspec refused"):
        FsspecSource("zip://x", storage_options={"fo": "/no/such/file.zip"})

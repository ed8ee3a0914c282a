"""FileSet: ranges from the page cache and from the storage are the same bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound
from stoker.source.file_set import FileSet
from stoker.source.pace import Pace
from stoker.source.patterns import find_files

STARTS, LENGTHS = np.array([0, 5000, 900_000]), np.array([100, 0, 1000])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "x").write_bytes(os.urandom(1 << 20))
    return tmp_path / "x"


def drop(path: Path) -> None:
    """Take the file out of the page cache, as far as the file system does that."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("cached", ["all", "none", "some"])
def test_ranges_are_the_same_wherever_they_lie(path: Path, cached: str) -> None:
    files, raw = FileSet([path]), path.read_bytes()
    if cached != "all":
        drop(path)
    if cached == "some":
        files.read(0, 0, 100)
    data, failures = files.fetch(np.zeros(3, np.int64), STARTS, LENGTHS)
    assert data.tobytes() == raw[:100] + raw[900_000:901_000] and not failures
    assert files.tally.received_bytes >= 1100


def test_a_file_that_was_replaced_or_removed_is_reported(path: Path) -> None:
    files = FileSet([path])
    path.write_bytes(os.urandom(1 << 20))
    os.utime(path, ns=(1, 1))
    _, failures = files.fetch(np.zeros(3, np.int64), STARTS, LENGTHS)
    assert sorted(failures) == [0, 2]
    with pytest.raises(SampleCorrupt, match="another version"):
        files.read(0, 0, 10)
    path.unlink()
    with pytest.raises(SampleNotFound, match="x is not there"):
        files.read(0, 0, 10)


def test_folders_patterns_and_braces(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    names = ["a1.npy", "a2.npy", "b.npy", "c.txt", "below/d.NPY"]
    for name in names:
        (tmp_path / name).touch()

    def found(*places: str) -> list[str]:
        files = find_files([f"{tmp_path}/{p}" for p in places], (".npy",), None, Pace())
        return [str(Path(file).relative_to(tmp_path)) for file in files]

    assert found("") == ["a1.npy", "a2.npy", "b.npy", "below/d.NPY"]
    assert found("a*.npy", "c.txt") == ["a1.npy", "a2.npy", "c.txt"]
    assert found("a{1,2}.npy") == ["a1.npy", "a2.npy"]
    assert found("**/*.NPY") == ["below/d.NPY"]
    with pytest.raises(ConfigError, match="stands for no files"):
        found("x*.npy")

"""FileSet: ranges from the page cache and from the storage are the same bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound
from stoker.source.file_set import FileSet, find_files
from stoker.source.pace import Pace

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


@pytest.mark.parametrize("cached", ["all", "none", "some"])
def test_ranges_that_lie_close_together_are_one_request(tmp_path: Path, cached: str) -> None:
    """In the order asked for, with ranges that overlap, have others in them, or are empty."""
    raw = [os.urandom(1 << 20) for _ in range(2)]
    for number, data in enumerate(raw):
        (tmp_path / str(number)).write_bytes(data)
        if cached != "all":
            drop(tmp_path / str(number))
    files = FileSet([tmp_path / "0", tmp_path / "1"])
    if cached == "some":
        files.read(1, 0, 1 << 20)
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 40):
        which, starts = rng.integers(0, 2, count), rng.integers(0, 900_000, count)
        lengths = rng.integers(0, 5000, count)
        expected = [
            raw[file][start : start + length]
            for file, start, length in zip(which, starts, lengths, strict=True)
        ]
        data, failures = files.fetch_near(which, starts, lengths, gap=10_000, largest=50_000)
        assert data.tobytes() == b"".join(expected) and not failures
    before = files.tally.requests
    starts = np.array([0, 1000, 3000])
    data, _ = files.fetch_near(np.ones(3, np.int64), starts, np.array([1000, 2000, 10]))
    assert data.tobytes() == raw[1][:3010] and files.tally.requests == before + 1


def test_a_failure_is_that_of_all_ranges_in_the_request(path: Path) -> None:
    files = FileSet([path])
    path.write_bytes(b"short")
    which, starts = np.zeros(3, np.int64), np.array([500_000, 0, 100])
    _, failures = files.fetch_near(which, starts, np.full(3, 100))
    assert sorted(failures) == [0, 1, 2]


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

"""The runtime directory on a full file system: jobs train, and share again when there is room."""

from __future__ import annotations

import contextlib
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.services import serving
from support.waiting import until

import stoker
from stoker import Cache
from stoker.jobs.protocol import ask
from stoker.source import MemorySource

NUM = 100
SOURCE = MemorySource([f"{i:08}".encode() * 50 for i in range(NUM)])


@pytest.fixture
def host_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "node"
    folder.mkdir()
    options = "size=128k,nr_inodes=40,mode=700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "stoker-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True)
    except OSError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("mounting is not permitted here")
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(folder / "run"))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, what: str) -> list[Path]:
    """Take all bytes, or names, that are left; return what was made for that."""
    made: list[Path] = []
    with contextlib.suppress(OSError):
        while True:
            path = folder / f"full-{len(made)}"
            with path.open("wb", buffering=0) as file:
                made.append(path)
                while what == "bytes":
                    file.write(bytes(4096))
    return made


def feed(**options: object) -> stoker.Feed:
    cache = Cache("100%", prefetch="64 KiB", **options)  # type: ignore[arg-type]
    return stoker.Feed(SOURCE, 10, cache=cache, recipe="lru")


def epoch(training: stoker.Feed) -> int:
    """Train for an epoch; return how many samples have been read so far."""
    batches = list(training)
    assert sorted(i for batch in batches for i in batch.ids.tolist()) == list(range(NUM))
    assert all(
        bytes(sample) == f"{i:08}".encode() * 50
        for batch in batches
        for i, sample in zip(batch.ids.tolist(), batch.data, strict=True)
    )
    return training.stats.fetched


@pytest.mark.parametrize("what", ["bytes", "names"])
def test_jobs_train_alone_while_it_is_full_and_share_later(host_path: Path, what: str) -> None:
    (host_path / "run").mkdir(mode=0o700)
    filler = fill(host_path, what)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with feed() as training:
            assert [epoch(training) for _ in range(2)] == [NUM, NUM]  # its cache is its own
    assert [w for w in caught if "cannot share this cache" in str(w.message)]
    assert all("No space left" in str(w.message) for w in caught)
    for path in filler:
        path.unlink()
    with feed() as one, feed() as two:
        assert [epoch(one), epoch(two)] == [NUM, 0]


def test_the_service_answers_and_jobs_go_on_when_it_becomes_full(
    host_path: Path, tmp_path: Path
) -> None:
    with serving(memory=1 << 30, disk=1 << 40):
        with warnings.catch_warnings(record=True) as caught, feed() as one:
            warnings.simplefilter("always")
            assert epoch(one) == NUM
            fill(host_path, "bytes")
            fill(host_path, "names")
            with feed(disk=tmp_path / "disk") as two:  # which nobody can write down there
                assert epoch(two) == 0
            assert epoch(one) == NUM
            assert "caches" in ask("list")
        assert all("No space left" in str(w.message) for w in caught)
        until(lambda: ask("list")["idle"])

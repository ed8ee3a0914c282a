"""The packaging process for real: packing, loading, dying, hanging, ending."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bundles_bench import MIN_BYTES, NUM, SAMPLES, SIZES, H, L, two_regions
from support.processes import processes_of
from support.s3 import Bucket
from support.waiting import await_true, until

from stoker.bundles import Packager, Packaging
from stoker.errors import ConfigError
from stoker.shared import SharedArray
from stoker.source.base import BaseSource
from stoker.source.held import MemorySource
from stoker.store.arena import Arena
from stoker.testing.sources import SlowSource

LOW = np.arange(NUM) % 4 != 0
needs_obstore = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None, reason="obstore is not installed"
)


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def source() -> SlowSource:
    return SlowSource(MemorySource(SAMPLES), latency=0.001)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with two_regions(4 * MIN_BYTES) as arena:
        yield arena


@pytest.fixture
def served() -> SharedArray:
    return SharedArray.create(NUM, np.uint32)


class Rank:
    """A rank that serves what packages bring."""

    def __init__(
        self, source: BaseSource, arena: Arena, served: SharedArray, settings: Packaging
    ) -> None:
        self.arena, self.served = arena, served
        self.packager = Packager(source, arena, served, settings, low=L, seed=-1)
        self.stamp = 0

    def begin(self, low: np.ndarray = LOW, missed: tuple[int, ...] = ()) -> None:
        self.stamp += 1
        places = SharedArray.copy_of(np.where(low, L, H).astype(np.uint8))
        ids = np.array(missed, np.uint32)
        self.packager.begin_epoch(self.stamp - 1, self.stamp, places, ids)

    def serve_one(self) -> bool:
        """Serve one sample of L that was not served yet, if there is one."""
        held = self.arena.list("L")
        fresh = held[self.served.array[held] < self.stamp]
        if not fresh.size:
            return False
        data, _, found = self.arena.get_many(fresh[:1])
        if found[0]:
            assert data.tobytes() == SAMPLES[int(fresh[0])]
        self.served.array[fresh[0]] = self.stamp
        return bool(found[0])

    def serve_all(self, low: np.ndarray = LOW, patience: float = 20.0) -> None:
        """Serve until every sample of low importance was."""
        while not self.has_served(low):
            # Fails when no package comes any more.
            until(lambda: self.serve_one() or self.has_served(low), patience)

    def has_served(self, low: np.ndarray) -> bool:
        return bool((self.served.array[low] == self.stamp).all())


@pytest.fixture
def rank(source: SlowSource, arena: Arena, served: SharedArray, tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(source, arena, served, Packaging(MIN_BYTES))
    yield rank
    rank.packager.close()
    assert await_true(lambda: not processes(tmp_path))


def processes(tmp: Path) -> list[int]:
    """The packaging processes that use this test's runtime directory."""
    return processes_of("stoker.bundles.packing", tmp)


def packages(tmp: Path) -> list[Path]:
    return list((tmp / "tmp").glob("stoker-packages-*/*.pkg"))


def test_every_low_sample_comes_with_a_package(
    rank: Rank, source: SlowSource, tmp_path: Path
) -> None:
    rank.begin()
    rank.serve_all()
    stats = rank.packager.stats()
    assert stats["package_reads"] == stats["packages_built"] >= SIZES[LOW].sum() // 1200
    assert stats["rebuild_reads"] == LOW.sum()
    assert source.reads.tolist() == LOW.astype(int).tolist()
    assert stats["packages_lost"] == 0
    flagged = np.flatnonzero(rank.packager.packaged.array)
    assert flagged.size
    assert LOW[flagged].all()
    assert packages(tmp_path)
    rank.arena.verify()


def test_the_next_epoch_is_packed_from_packages(rank: Rank, source: SlowSource) -> None:
    rank.begin()
    rank.serve_all()
    other = np.arange(NUM) % 4 != 1
    rank.begin(other, missed=(0, 4))
    rank.serve_all(other)
    assert rank.packager.stats()["repack_reads"] > 0
    fresh = other & ~LOW
    assert source.reads.tolist() == (LOW.astype(int) + fresh).tolist()


def test_it_ends_with_its_rank_and_takes_its_packages_along(
    source: SlowSource, arena: Arena, served: SharedArray, tmp_path: Path
) -> None:
    rank = Rank(source, arena, served, Packaging(MIN_BYTES))
    rank.begin()
    rank.serve_all()
    assert len(processes(tmp_path)) == 1
    rank.packager.close()
    rank.packager.close()
    assert await_true(lambda: not processes(tmp_path))
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".stoker"]


SCRIPT = """
import signal
import numpy as np
from support.waiting import until
from bundles_bench import L, MIN_BYTES, NUM, SAMPLES, two_regions
from stoker.bundles import Packager, Packaging
from stoker.shared import SharedArray
from stoker.source.held import MemorySource
arena, served = two_regions(4 * MIN_BYTES), SharedArray.create(NUM, np.uint32)
packager = Packager(MemorySource(SAMPLES), arena, served, Packaging(MIN_BYTES), low=L)
places = SharedArray.copy_of(np.full(NUM, L, np.uint8))
packager.begin_epoch(0, 1, places, np.empty(0, np.uint32))
until(lambda: packager.stats()["package_reads"] >= 2)
print("loaded", flush=True)
signal.pause()
"""


def test_it_ends_when_training_is_killed(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    training = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, env=environ)
    try:
        assert training.stdout is not None
        assert training.stdout.readline() == b"loaded\n"
        assert len(processes(tmp_path)) == 1
        assert packages(tmp_path)
    finally:
        training.kill()
        training.communicate()
    assert await_true(lambda: not processes(tmp_path))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_two_ranks_share_one_process(
    source: SlowSource, arena: Arena, served: SharedArray, tmp_path: Path
) -> None:
    ranks = [Rank(source, arena, served, Packaging(MIN_BYTES)) for _ in range(2)]
    try:
        for number, rank in enumerate(ranks):
            rank.begin(missed=(number,))
        ranks[0].serve_all()
        assert len(processes(tmp_path)) == 1
        stats = [rank.packager.stats() for rank in ranks]
        assert stats[0] == stats[1]
        assert source.reads.tolist() == LOW.astype(int).tolist()
        flags = [rank.packager.packaged.array for rank in ranks]
        assert flags[0].any()
        assert np.array_equal(*flags)
        ranks[0].packager.close()
        ranks[1].begin()
        ranks[1].serve_all()
    finally:
        for rank in ranks:
            rank.packager.close()


def test_killed_while_writing_it_is_started_again_with_one_warning(
    rank: Rank, source: SlowSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stoker"):
        for _ in range(2):
            rank.begin()
            while rank.packager.stats()["packages_built"] < 3:
                rank.serve_one()
            for pid in processes(tmp_path):
                os.kill(pid, signal.SIGKILL)
            (half,) = {path.parent for path in packages(tmp_path)}
            (half / f"{packages(tmp_path)[0].name}.new").write_bytes(b"half a package")
            rank.serve_all()
    assert len([r for r in caplog.records if "died or hung" in r.message]) == 1
    # What it had built was found again; at most what was in its hands was read twice.
    assert source.reads[LOW].max() <= 2
    assert (source.reads[LOW] == 1).mean() > 0.7
    assert not list((tmp_path / "tmp").glob("*/*.new"))
    rank.arena.verify()


def test_hung_it_is_replaced(rank: Rank, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank.begin()
    assert await_true(rank.serve_one)
    time.sleep(1.2)  # it has said that it is alive
    (hung,) = processes(tmp_path)
    os.kill(hung, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING, "stoker"):
        rank.serve_all()
        assert await_true(lambda: hung not in processes(tmp_path))
    assert "died or hung" in caplog.text


def test_packages_of_a_directory_serve_the_next_run(
    source: SlowSource, served: SharedArray, tmp_path: Path
) -> None:
    settings = Packaging(MIN_BYTES, str(tmp_path / "packages"))
    for run in range(2):
        with two_regions(4 * MIN_BYTES) as arena:
            rank = Rank(source, arena, SharedArray.create(NUM, np.uint32), settings)
            rank.begin()
            rank.serve_all()
            stats = rank.packager.stats()
            rank.packager.close()
        assert await_true(lambda: not processes(tmp_path))
        assert stats["rebuild_reads"] == (0 if run else LOW.sum())
    assert list((tmp_path / "packages").glob("*.pkg"))


@needs_obstore
def test_packages_in_an_object_store(
    source: SlowSource, arena: Arena, served: SharedArray, bucket: Bucket, tmp_path: Path
) -> None:
    settings = Packaging(MIN_BYTES, f"{bucket.url}/packages", bucket.options())
    rank = Rank(source, arena, served, settings)
    try:
        rank.begin()
        rank.serve_all()
        stats = rank.packager.stats()
        assert stats["package_reads"] == stats["packages_built"] > 5
        assert source.reads.tolist() == LOW.astype(int).tolist()
    finally:
        rank.packager.close()
    assert await_true(lambda: not processes(tmp_path))


def test_a_depot_that_vanishes_is_built_again(rank: Rank, tmp_path: Path) -> None:
    rank.begin()
    rank.serve_all()
    (place,) = (tmp_path / "tmp").iterdir()
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    rank.begin()
    rank.serve_all()
    assert rank.packager.stats()["packages_lost"] > 0


def test_a_depot_that_cannot_be_used_is_said_once_and_training_goes_on(
    source: SlowSource,
    arena: Arena,
    served: SharedArray,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = tmp_path / "packages"
    first = Rank(source, arena, served, Packaging(MIN_BYTES, str(place)))
    first.begin()
    first.serve_all()
    with caplog.at_level(logging.WARNING, "stoker"), two_regions(4 * MIN_BYTES) as other:
        marks = SharedArray.create(NUM, np.uint32)
        second = Rank(source, other, marks, Packaging(MIN_BYTES, str(place)))
        second.begin()
        assert await_true(lambda: "another job" in caplog.text)
        assert second.arena.list("L").size == 0
        first.packager.close()
        second.serve_all()  # when the place is free, packages come after all
        second.packager.close()
    assert len([r for r in caplog.records if "no packages for now" in r.message]) == 1


def test_l_cache_never_below_one_package(source: SlowSource, served: SharedArray) -> None:
    needed = MIN_BYTES + int(SIZES.max()) - 1
    with (
        two_regions(needed - 1) as small,
        pytest.raises(ConfigError, match=f"{needed} bytes: give the cache more"),
    ):
        Packager(source, small, served, Packaging(MIN_BYTES), low=L)
    with two_regions(1) as later:  # grows to that before there are samples of low importance
        Packager(source, later, served, Packaging(MIN_BYTES), low=L, region_bytes=needed).close()
    with two_regions(needed + 1) as enough:  # shares are rounded down to whole bytes
        rank = Rank(source, enough, served, Packaging(MIN_BYTES))
        rank.begin()
        rank.serve_all()
        rank.packager.close()


def test_a_data_set_smaller_than_a_package(served: SharedArray, tmp_path: Path) -> None:
    everything = int(SIZES.sum())
    source = MemorySource(SAMPLES)
    settings = Packaging()  # of a MiB
    assert settings.least_region_bytes(source.sizes) == everything
    with two_regions(everything) as arena:
        rank = Rank(source, arena, served, settings)
        rank.begin()
        rank.serve_all()
        assert rank.packager.stats()["packages_built"] == 1
        rank.packager.close()


def test_nothing_of_low_importance(rank: Rank, source: SlowSource) -> None:
    rank.begin(np.zeros(NUM, np.bool_))
    rank.begin(np.ones(NUM, np.bool_))
    rank.serve_all(np.ones(NUM, np.bool_))
    assert source.reads.tolist() == [1] * NUM


class Closure(BaseSource):
    """A source that cannot be passed on."""

    fingerprint = "closure"
    sizes = np.full(NUM, 10)

    def __init__(self) -> None:
        self.read = lambda ids: [b"x" * 10 for _ in ids]

    def __len__(self) -> int:
        return NUM


def test_a_source_that_cannot_be_passed_on_is_left_to_the_workers(
    arena: Arena, served: SharedArray, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "stoker"):
        rank = Rank(Closure(), arena, served, Packaging(MIN_BYTES))
        rank.begin()
        assert await_true(lambda: "workers read them" in caplog.text)
        rank.packager.close()
    assert not processes(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"region": "M"}, "is not a region of the cache"),
        ({"owner": "a/b"}, "owner"),
        ({"settings": Packaging(MIN_BYTES, "http://host/x")}, "cannot be written"),
    ],
)
def test_arguments_that_are_refused(
    source: SlowSource, arena: Arena, served: SharedArray, change: dict[str, object], why: str
) -> None:
    arguments = {"settings": Packaging(MIN_BYTES), "low": L, **change}
    with pytest.raises(ConfigError, match=why):
        Packager(source, arena, served, **arguments)  # type: ignore[arg-type]


def test_places_of_another_length_are_refused(rank: Rank) -> None:
    with pytest.raises(ConfigError, match=r"give u8\[300\]"):
        rank.packager.begin_epoch(0, 1, SharedArray.create(5, np.uint8), np.empty(0, np.uint32))


@pytest.mark.parametrize("size", [0, -1, (1 << 28) + 1])
def test_sizes_that_make_no_sense(size: int) -> None:
    with pytest.raises(ConfigError, match=f"min_bytes={size}"):
        Packaging(size)

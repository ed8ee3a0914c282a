"""The disk tier under what kills jobs: SIGKILL, power cuts, full disks, directories that vanish."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.waiting import some_time

from stoker.errors import CapacityError, ConfigError
from stoker.policy import LRU
from stoker.source.packed import Packed
from stoker.store.arena import Arena
from stoker.store.disk import CacheDir, DiskMeta, file_bytes, open_disk
from stoker.store.memory_tier import MemoryTier
from stoker.store.stacked import StackedTier
from survival.payloads import NUM_IDS, SIZES, packed, wrong
from survival.support import die_with_parent

MEAN = 3000
MEMORY = int(SIZES.sum()) // 10
META = DiskMeta("survival", NUM_IDS, int(SIZES.sum()) // 4, MEAN)
ALL = np.arange(NUM_IDS, dtype=np.uint32)
KILLS = 50


@pytest.fixture(autouse=True)
def _own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def place(tmp_path: Path) -> CacheDir:
    return CacheDir(tmp_path / "cache")


@contextlib.contextmanager
def opened(place: CacheDir, meta: DiskMeta = META) -> Iterator[StackedTier]:
    memory = Arena(NUM_IDS, MEMORY, MEAN)
    memory.configure(LRU().regions())
    with open_disk(place, meta, LRU().regions(), keep_free=0) as disk:
        tier = StackedTier(MemoryTier(memory), MemoryTier(disk.arena))
        try:
            yield tier
        finally:
            tier.close()


def work(tier: StackedTier, until: Callable[[], bool]) -> int:
    """Read and put random samples, as a store does; return how many were found."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    total = 0
    while not until():
        ids = np.unique(rng.integers(0, NUM_IDS, 40)).astype(np.uint32)
        got, found = tier.get_many(ids)
        assert not wrong(ids, (got.data, got.offsets, found))
        own = tier.claim(ids[~found])
        mine = ids[~found][own]
        tier.put_many(mine, Packed(*packed(mine)))
        tier.abandon(mine)
        total += int(found.sum())
    return total


def some_rounds(tier: StackedTier, rounds: int = 30) -> int:
    return work(tier, iter([False] * rounds + [True]).__next__)


def check_disk(place: CacheDir, meta: DiskMeta = META) -> int:
    """Check all that can be read; return how many samples are there."""
    with open_disk(place, meta, LRU().regions(), keep_free=0) as disk:
        disk.arena.verify()
        got = disk.arena.get_many(ALL)
        assert not wrong(ALL, got)
        disk.arena.verify()
        return int(got[2].sum())


def job(place: CacheDir, ready: int) -> None:
    """Run a job of three processes until it is killed; its leader never returns."""
    os.setpgid(0, 0)
    die_with_parent()
    try:
        with opened(place) as tier:
            for _ in range(2):
                if os.fork() == 0:
                    die_with_parent()
                    work(tier, lambda: False)
            some_rounds(tier, 3)  # else a busy machine kills it before it has kept anything
            os.write(ready, b"r")
            work(tier, lambda: False)
    except BaseException as error:
        os.write(ready, f"failed: {error!r}".encode())
    finally:
        os._exit(1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_whole_job_is_killed_again_and_again(place: CacheDir) -> None:
    there = []
    for _ in range(KILLS):
        listen, ready = os.pipe()
        leader = os.fork()
        if leader == 0:
            job(place, ready)
        os.close(ready)
        assert os.read(listen, 200) == b"r"
        some_time(0.005, 0.06)
        os.killpg(leader, signal.SIGKILL)
        os.waitpid(leader, 0)
        rest = os.read(listen, 200)  # until its children are gone as well
        os.close(listen)
        assert rest == b""
        there.append(check_disk(place))
    assert there[-1] > NUM_IDS / 10, there
    with opened(place) as tier:
        assert some_rounds(tier) > 0


def test_a_power_cut_costs_misses_only(place: CacheDir) -> None:
    rng = np.random.default_rng(3)
    counts = []
    for _ in range(8):
        with opened(place) as tier:
            some_rounds(tier)
        old = place.segment.read_bytes()
        with opened(place) as tier:
            some_rounds(tier)
        before = check_disk(place)
        with place.segment.open("r+b") as file:
            # The first page was on disk before there was a sample.
            for page in range(1, len(old) // 4096):
                if rng.random() < 0.3:
                    os.pwrite(file.fileno(), old[page * 4096 : (page + 1) * 4096], page * 4096)
        counts.append((before, check_disk(place)))
    assert all(after > 0 for _, after in counts)
    with opened(place) as tier:
        some_rounds(tier)
    check_disk(place)


def test_the_directory_vanishes(place: CacheDir) -> None:
    with opened(place) as tier:
        some_rounds(tier)
        shutil.rmtree(place.path)
        assert some_rounds(tier) > 0
        assert tier.stats()["disk_errors"] == 0, "what is open stays so"
    with opened(place) as tier:
        assert tier.disk.stats()["entries"] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    size = file_bytes(META) + (1 << 20)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "stoker-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True)
    except OSError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def flood(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def test_somebody_else_fills_the_disk(small_disk: Path) -> None:
    place = CacheDir(small_disk / "cache")
    with opened(place) as tier:
        flood(small_disk / "flood")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # its room was taken when it was made
            assert some_rounds(tier) > 0
        assert tier.disk.arena.io_errors == 0
    check_disk(place)
    place.clean()
    flood(small_disk / "flood2")
    with pytest.raises((CapacityError, ConfigError)), opened(place):
        pass
    (small_disk / "flood").unlink()
    (small_disk / "flood2").unlink()
    with opened(place) as tier:
        assert some_rounds(tier) > 0


LOADER_JOB = """
import sys
import numpy as np
from stoker import Cache, Loader, SampleDataset
from stoker.source.files import FileSource
from pathlib import Path

def decode(data):
    return np.frombuffer(data, np.uint8)[:8].copy()

def main(folder, cache_dir, forever):
    source = FileSource(sorted(Path(folder).iterdir()))
    with Loader(SampleDataset(source, decode=decode), 8, num_workers=2,
                cache=Cache("10%", disk=cache_dir, disk_size="100%"), recipe="lru") as loader:
        for epoch in range(1000 if forever else 1):
            for batch in loader:
                for sample in batch.numpy():
                    assert (sample == sample[0]).all()
                print("batch", flush=True)
        print("fetched", loader.stats.fetched, "disk", loader.stats.disk_hits, flush=True)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "forever")
"""


def test_a_training_job_is_killed_and_goes_on_from_disk(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(200):
        (tmp_path / "data" / f"{i:03}").write_bytes(bytes([i]) * (100 + i))
    (tmp_path / "job.py").write_text(LOADER_JOB)
    command = [sys.executable, tmp_path / "job.py", tmp_path / "data", tmp_path / "cache"]
    with subprocess.Popen(
        [*command, "forever"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as first:
        assert first.stdout is not None
        for _ in range(40):  # more than an epoch
            assert first.stdout.readline() == "batch\n"
        os.killpg(first.pid, signal.SIGKILL)
    done = subprocess.run([*command, "once"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    assert int(words[1]) == 0, done.stdout
    assert int(words[3]) >= 200

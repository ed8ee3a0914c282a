"""Disk that caches lend each other, and what stays of it when jobs or the service end."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.services import serving
from support.waiting import until

from jobs.test_admission import MIB, listing
from jobs.test_quotas import Training
from stoker.cli.root import root
from stoker.errors import ConfigError
from stoker.jobs import holding as holding_module
from stoker.jobs.holding import Asker, Holding
from stoker.jobs.partition import IDLE
from stoker.jobs.quotas import Quota
from stoker.jobs.service import Service
from stoker.policy.baselines import LRU
from stoker.store.arena import Arena
from stoker.store.disk import CacheDir, DiskMeta, file_bytes, open_disk
from stoker.store.registry import SharedArena

LEND = "ann:disk=8MiB,disk_most=32MiB", "bob:disk=22MiB,disk_most=32MiB"


class OnDisk(Training):
    """A job with hardly any memory, and a disk cache."""

    def __init__(self, name: str, number: int, folder: Path, memory: str | int = 2 * MIB) -> None:
        self.folder = folder / name
        super().__init__(name, number, self.folder, memory)

    @property
    def arena(self) -> Arena | None:
        """What it has on disk, once it is open."""
        cached = self._feed._session.cached
        return None if cached is None else cached.store.tier.arenas[1]

    @property
    def held(self) -> float:
        """Payload that it has on disk, in MiB."""
        return 0.0 if self.arena is None else self.arena.stats()["payload_bytes"] / MIB


def taken_by(folder: Path) -> float:
    """Return what the file system says of a disk cache, in MiB."""
    file = CacheDir(folder).segment
    return file.stat().st_blocks * 512 / MIB if file.exists() else 0.0


def borrowed(service: Service) -> float:
    """Return what the jobs of the first quota have borrowed, in MiB."""
    return int(service.holding.quotas()[0]["disk_borrowed_bytes"]) / MIB


@contextlib.contextmanager
def lending(*quotas: str) -> Iterator[Service]:
    """A service with 32 MiB of disk: for one job of 24 MB and a third of another one."""
    with serving(disk=32 * MIB, quotas=tuple(map(Quota.parse, quotas))) as service:
        yield service


def as_process(name: str, number: int, folder: Path) -> subprocess.Popen[str]:
    """Run such a job in a process of its own until it is killed; it pauses when told a line."""
    program = (
        "import sys; from pathlib import Path; from jobs.test_disk_quotas import OnDisk\n"
        "with OnDisk(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])) as job:\n"
        "    sys.stdin.readline(); job.may_train.clear(); sys.stdin.read()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, name, str(number), str(folder)],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )


@contextlib.contextmanager
def killed_after(job: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield job
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
        assert job.stdin is not None
        job.stdin.close()


# --- quotas ---


def test_a_quota_of_disk_that_is_borrowed_is_read_from_its_text() -> None:
    quota = Quota.parse("a:memory=1KiB,disk=2KiB,disk_most=4KiB")
    assert quota == Quota("a", 1024, 2048, disk_most=4096)
    assert (quota.bound, quota.on_disk.bound) == (1024, 4096)
    assert (Quota("a", disk=5).on_disk.bound, Quota("a").on_disk.bound) == (5, float("inf"))


@pytest.mark.parametrize("text", ["a:disk=2,disk_most=1", "a:disk_most=-1", "a:disk_most=x"])
def test_a_quota_of_disk_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Quota.parse(text)
    assert CliRunner().invoke(root, ["serve", "--quota", text]).exit_code != 0


# --- lent and given back ---


def test_a_running_job_borrows_disk_and_gives_back_what_is_not_its_own(tmp_path: Path) -> None:
    with lending(*LEND) as service, OnDisk("ann", 1, tmp_path) as ann:
        until(lambda: ann.held > 20)
        assert borrowed(service) > 12
        assert 'stoker_quota_disk_borrowed_bytes{jobs="ann"}' in service.metrics()
        until(lambda: "of it borrowed" in listing())
        with OnDisk("bob", 2, tmp_path) as bob:
            until(lambda: bob.held > 16 and ann.held < 9)
            until(lambda: taken_by(ann.folder) < 10)  # the file system has it back
            until(lambda: taken_by(ann.folder) + taken_by(bob.folder) < 33)
            until(lambda: "jobs named ann have 8.0 MiB by right" in listing())
            bob.may_train.clear()
            until(lambda: ann.held > 20)  # while bob is idle
            until(lambda: "it is idle, and lent to others" in listing())
            bob.may_train.set()
            until(lambda: bob.held > 16 and ann.held < 9)
        # What bob left is lent as well: it may borrow, so it lends.
        until(lambda: ann.held > 20 and taken_by(bob.folder) < 10)


def test_a_borrower_that_was_killed_leaves_its_disk_to_others(tmp_path: Path) -> None:
    with lending(*LEND) as service:
        with killed_after(as_process("ann", 1, tmp_path)):
            until(lambda: borrowed(service) > 12 and taken_by(tmp_path / "ann") > 20)
            until(lambda: str(tmp_path / "ann") in service.holding._on_disk)
        with OnDisk("bob", 2, tmp_path) as bob:
            until(lambda: bob.held > 20 and taken_by(tmp_path / "ann") < 12)
            assert service.holding.limits()["disk_bytes"] <= 33 * MIB


def test_a_lender_that_was_killed_does_so_too(tmp_path: Path) -> None:
    with lending(*LEND) as service, OnDisk("ann", 1, tmp_path) as ann:
        until(lambda: ann.held > 20)
        with killed_after(as_process("bob", 2, tmp_path)) as lender:
            until(lambda: taken_by(tmp_path / "bob") > 16 and ann.held < 9)
            assert lender.stdin is not None
            lender.stdin.write("\n")
            lender.stdin.flush()
            until(lambda: ann.held > 20)
        until(lambda: not service.holding._on_disk.keys() - {str(ann.folder)})
        with killed_after(as_process("bob", 2, tmp_path)):  # it comes back to its own
            until(lambda: taken_by(tmp_path / "bob") > 16 and ann.held < 9)
        until(lambda: ann.held > 20 and taken_by(tmp_path / "bob") < 12)


def test_a_service_that_is_back_lends_on(tmp_path: Path) -> None:
    with contextlib.ExitStack() as jobs:
        with lending(*LEND):
            ann, bob = (
                jobs.enter_context(OnDisk(name, number, tmp_path))
                for number, name in enumerate(("ann", "bob"), 1)
            )
            until(lambda: bob.held > 16 and 6 < ann.held < 9)
            bob.may_train.clear()
            until(lambda: ann.held > 20)
        with lending(*LEND) as later:
            until(lambda: len(later.holding.limited()) > 0)
            bob.may_train.set()
            until(lambda: bob.held > 16 and 6 < ann.held < 9)
        with serving(disk=64 * MIB):  # what was limited grows when a later one has no quotas
            until(lambda: ann.held > 20 and bob.held > 20)


def test_the_next_run_finds_what_is_not_lent(tmp_path: Path) -> None:
    """A quota without ``disk_most`` lends nothing, and what its jobs leave stays."""
    with lending("keeps:disk=27MiB", "borrows:disk=5MiB,disk_most=32MiB"):
        with OnDisk("keeps", 1, tmp_path) as keeps:
            until(lambda: keeps.held > 23)
        with OnDisk("borrows", 2, tmp_path) as borrows:
            until(lambda: borrows.held > 3)
            until(lambda: "jobs named borrows have 5.0 MiB by right" in listing())
            with OnDisk("keeps", 1, tmp_path) as keeps:
                until(lambda: keeps.arena is not None)
                assert keeps.held > 23


def test_a_job_that_finds_all_it_needs_in_memory_keeps_its_disk(tmp_path: Path) -> None:
    """It looked idle, as nothing was asked of its disk."""
    with lending(*LEND) as service, OnDisk("bob", 2, tmp_path, "100%") as bob:
        until(lambda: bob.held > 22)
        held = service.holding._on_disk[str(bob.folder)]
        until(lambda: time.monotonic() - held._seen > 3 * IDLE)  # its memory has all, too
        with OnDisk("ann", 1, tmp_path) as ann:
            until(lambda: ann.held > 6)
            begin = time.monotonic()
            until(lambda: time.monotonic() - begin > 2 * IDLE)
            assert held._seen < begin, "it needed its disk: this shows nothing"
            assert bob.held > 16
            assert ann.held < 9


def test_disk_that_was_granted_is_not_lent_before_the_job_has_opened_it(tmp_path: Path) -> None:
    quotas = [Quota("ann", disk=600, disk_most=1000), Quota("bob", disk=400, disk_most=1000)]
    for name in ("ann", "bob"):
        CacheDir(tmp_path / name).mark()
    holding = Holding(disk=1000, quotas=quotas)
    ann, bob = str(tmp_path / "ann"), str(tmp_path / "bob")
    assert holding.admit_disk(ann, 900, Asker("ann"), 100) is None
    assert holding.granted_on_disk(ann) == 900
    assert holding.admit_disk(bob, 900, Asker("bob"), 150) is None
    assert holding.granted_on_disk(bob) == 150, "what it takes without a sample"
    holding.balance_disk()
    assert holding.limits()["disk_bytes"] == 1050
    holding.close()


def test_a_job_that_does_not_borrow_gets_disk_that_is_its_own_and_lent(tmp_path: Path) -> None:
    with (
        lending("ann:disk=4MiB,disk_most=32MiB", "keeps:disk=27MiB"),
        OnDisk("ann", 1, tmp_path) as ann,
    ):
        until(lambda: ann.held > 20)
        with OnDisk("keeps", 2, tmp_path) as keeps:
            until(lambda: keeps.held > 23 and ann.held < 5)


def open_small(folder: Path, name: str) -> tuple[SharedArena, int]:
    """Open a disk cache, and return the bytes that it takes."""
    meta = DiskMeta(name, 100, MIB, MIB // 100)
    opened = open_disk(CacheDir(folder / name), meta, LRU().regions(), keep_free=0)
    return opened, file_bytes(meta)


def test_a_folder_that_is_removed_while_a_job_uses_it_stops_no_service(tmp_path: Path) -> None:
    """It ended with a KeyError when another job had asked for disk."""
    holding = Holding(disk=8 * MIB, quotas=[Quota("ann", disk=MIB, disk_most=8 * MIB)])
    path = str(tmp_path / "one")
    opened, size = open_small(tmp_path, "one")
    assert holding.admit_disk(path, size, Asker("ann")) is None
    holding.look()
    shutil.rmtree(path)
    assert holding.admit_disk(str(tmp_path / "two"), size) is None
    for _ in range(2):
        holding.look()
        holding.balance_disk()
    assert holding.limits()["disk_bytes"] == 2 * size
    opened.close()
    for _ in range(2):
        holding.look()
        holding.balance_disk()
    holding.close()


def test_a_job_that_was_killed_before_it_made_its_cache_takes_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had been granted counted until somebody removed the folder."""
    monkeypatch.setattr(holding_module, "_OPENS", 0.0)
    holding = Holding(disk=8 * MIB, quotas=[Quota("ann", disk=MIB, disk_most=8 * MIB)])
    folder = CacheDir(tmp_path / "one")
    folder.mark()
    assert holding.admit_disk(str(folder.path), 8 * MIB, Asker("ann"), MIB) is None
    assert holding.limits()["disk_bytes"] == 8 * MIB
    holding.balance_disk()
    assert holding.limits()["disk_bytes"] == 0
    holding.close()


def test_a_job_need_not_wait_for_disk_that_a_former_one_gives_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked for the folder waited until all was given back, and got no answer in time."""
    opened, size = open_small(tmp_path, "one")
    holding = Holding(disk=size, quotas=[Quota("ann", disk=size // 2, disk_most=size // 2)])
    folder = CacheDir(tmp_path / "one")
    assert holding.admit_disk(str(folder.path), size // 2, Asker("ann"), 0) is None
    holding.look()
    is_giving, may_end = threading.Event(), threading.Event()
    limit = Arena.limit

    def slow(arena: Arena, *arguments: Any, **options: Any) -> int:
        is_giving.set()
        may_end.wait()
        return limit(arena, *arguments, **options)

    monkeypatch.setattr(Arena, "limit", slow)
    giving = threading.Thread(target=holding.balance_disk)
    giving.start()
    is_giving.wait()
    opened.close()
    assert holding.admit_disk(str(folder.path), size // 2, Asker("ann"), 0) is None
    assert giving.is_alive()
    assert folder.in_use()
    may_end.set()
    giving.join()
    assert not folder.in_use()
    holding.close()


def open_files() -> int:
    gc.collect()  # what other tests left
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_cache_in_the_place_of_one_that_was_removed_is_held_and_let_go_of(tmp_path: Path) -> None:
    """The earlier one was forgotten, and joined again at each look."""
    holding = Holding(disk=8 * MIB, quotas=[Quota("ann", disk=MIB, disk_most=8 * MIB)])
    path = str(tmp_path / "one")
    before = open_files()
    opened, size = open_small(tmp_path, "one")
    assert holding.admit_disk(path, size, Asker("ann")) is None
    holding.look()
    shutil.rmtree(path)
    (tmp_path / "in its place").mkdir()  # so that the next one is not taken for this one
    assert holding.admit_disk(path, size, Asker("ann")) is None
    meta = DiskMeta("another", 100, MIB, MIB // 100)
    later = open_disk(CacheDir(path), meta, LRU().regions(), keep_free=0)
    holding.look()
    held = open_files()
    for _ in range(3):
        holding.look()
        holding.balance_disk()
    assert open_files() <= held
    assert holding.limits()["disk_bytes"] == 2 * size
    assert holding.quotas()[0]["disk_bytes"] == 2 * size
    opened.close()
    holding.look()
    holding.balance_disk()
    assert holding.limits()["disk_bytes"] == size
    assert holding.granted_on_disk(path) == size
    later.close()
    holding.look()
    holding.close()
    assert open_files() <= before


def test_disk_is_granted_though_its_folder_is_not_there_yet(tmp_path: Path) -> None:
    """It was forgotten when another job asked, and granted once more."""
    holding = Holding(disk=1000)
    assert holding.admit_disk(str(tmp_path / "ann"), 900) is None
    assert holding.admit_disk(str(tmp_path / "bob"), 900) == 100
    assert holding.limits()["disk_bytes"] == 900
    holding.close()


def test_who_does_not_answer_keeps_nobody_else_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process that had a cache, or a folder that hung, kept all jobs from theirs."""
    hangs, may_end = threading.Event(), threading.Event()

    def never(*_: Any) -> Any:
        hangs.set()
        may_end.wait()
        raise ConfigError("it was stopped")

    monkeypatch.setattr(holding_module, "join", never)
    monkeypatch.setattr(holding_module, "Left", never)
    quotas = [Quota("ann", disk=MIB, disk_most=4 * MIB)]
    holding = Holding(memory=MIB, disk=8 * MIB, quotas=quotas)
    path = str(tmp_path / "one")
    opened, size = open_small(tmp_path, "one")
    for hanging in (holding.look, holding.balance_disk):
        thread = threading.Thread(target=hanging)
        thread.start()
        hangs.wait()
        assert holding.admit("memory", 1000, 1000, []) is None
        assert holding.limits()["disk_limit_bytes"] == 8 * MIB
        assert holding.turned_down() == holding.limited() == []
        assert thread.is_alive()
        may_end.set()
        thread.join()
        hangs.clear()
        may_end.clear()
        monkeypatch.setattr(holding_module, "_OPENS", 0.0)
        assert holding.admit_disk(path, size, Asker("ann")) is None  # left, for the second time
    opened.close()
    holding.close()


def test_what_cannot_be_read_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged description ended the service; of two, each was read four times a second."""
    monkeypatch.setattr(holding_module, "_OPENS", 0.0)
    holding = Holding(disk=8 * MIB, quotas=[Quota("ann", disk=MIB, disk_most=8 * MIB)])
    path = tmp_path / "one"
    opened, size = open_small(tmp_path, "one")
    opened.close()
    facts = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**facts, "mean_size": 0}))
    assert holding.admit_disk(str(path), size, Asker("ann")) is None
    reads = []
    read = CacheDir.read
    monkeypatch.setattr(CacheDir, "read", lambda folder: reads.append(folder) or read(folder))
    for _ in range(3):
        holding.balance_disk()
    assert len(reads) == 1
    assert holding.limits()["disk_bytes"] == size, "it counts"
    holding.close()


def test_a_defect_of_ours_does_not_end_the_dividing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fails(holding: Holding) -> None:
        calls.append(holding)
        raise KeyError("a defect")

    monkeypatch.setattr(Holding, "balance_disk", fails)
    with lending(*LEND):
        until(lambda: len(calls) > 1)
    assert "a defect" in caplog.text

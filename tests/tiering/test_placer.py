"""Placement: who gets room, what is reused, what a failure costs. The table is the witness."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.tiering import copier, placer
from stoker.tiering.config import Config, TierConfig
from stoker.tiering.layout import State
from stoker.tiering.placer import Placer
from stoker.tiering.table import Settings, Table, TierPlace
from stoker.tiering.tier_dir import TierDir
from tiering.conftest import age, write_files


class Rig:
    """A placer with its table and tiers."""

    def __init__(self, folder: Path, quotas: tuple[int, ...], **options: Any) -> None:
        self.source = folder / "source"
        tiers = tuple(TierConfig(folder / f"tier{i}", quota) for i, quota in enumerate(quotas))
        self.config = Config(self.source, tiers, self.source, **{"threads": 2, **options})
        self.tiers = [TierDir(tier.path, self.source) for tier in tiers]
        places = [TierPlace(tier.copies, tier.parts, tier.dev) for tier in self.tiers]
        (folder / "table").unlink(missing_ok=True)
        limits = Settings(60_000, 8 << 20, 16 << 20, 3_000, 2_000)
        self.table = Table(folder / "table", [self.source], places, limits)
        self.placer = Placer(self.config, self.table, self.tiers)

    def open(self, *names: str) -> None:
        """Ask for files, and wait until all is settled."""
        for name in names:
            self.placer.opened(os.fsencode(name))
        self.settle()

    def settle(self) -> None:
        wait_for(self.placer.is_idle)

    def entry(self, name: str) -> dict[str, Any]:
        number = self.table.find(os.fsencode(name))
        assert number is not None
        return self.table.entry(number)

    def states(self, *names: str) -> list[State]:
        return [self.entry(name)["state"] for name in names]

    def copy(self, name: str) -> Path:
        """The copy that the table leads to, checked."""
        entry = self.entry(name)
        assert entry["state"] is State.PLACED
        copy = self.tiers[entry["tier"]].copies / name
        status, original = copy.stat(), (self.source / name).stat()
        assert status.st_ino == entry["copy_ino"]
        assert (status.st_size, status.st_mtime_ns) == (original.st_size, original.st_mtime_ns)
        assert copy.read_bytes() == (self.source / name).read_bytes()
        return copy

    def close(self) -> None:
        self.placer.close()
        for tier in self.tiers:
            tier.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


@contextmanager
def rig(folder: Path, *quotas: int, **options: Any) -> Iterator[Rig]:
    (folder / "source").mkdir(exist_ok=True)
    result = Rig(folder, quotas, **options)
    try:
        yield result
    finally:
        result.close()
    assert not [part for tier in result.tiers for part in tier.parts.glob("*")]


def test_first_tier_with_room_and_whoever_fits_nowhere_stops_nobody(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 60, "b": 60, "c": 500, "d/e/f": 40, "g": 1})
    with rig(tmp_path, 100, 80) as it:
        for name in ("a", "b", "c", "d/e/f", "g"):
            it.open(name)
        assert [it.entry(name)["tier"] for name in ("a", "b", "d/e/f", "g")] == [0, 1, 0, 1]
        assert it.states("c") == [State.REFUSED]
        for name in ("a", "b", "d/e/f", "g"):
            it.copy(name)
        assert it.placer.rooms.used() == [100, 61]
        counts = it.placer.counts
        assert [tier.copied_bytes for tier in counts.tiers] == [100, 61] and counts.refused == 1


def test_quotas_hold_at_every_moment_and_all_threads_count(tmp_path: Path) -> None:
    sizes = {f"{i:03d}": 1000 + 7 * i for i in range(200)}
    write_files(tmp_path / "source", sizes)
    with rig(tmp_path, 60_000, 40_000, threads=8) as it:
        it.open(*sizes)
        placed = [it.entry(name) for name in sizes]
        for tier, quota in enumerate((60_000, 40_000)):
            held = [e for e in placed if e["state"] is State.PLACED and e["tier"] == tier]
            used = sum(e["source_size"] for e in held)
            assert used == it.placer.rooms.used()[tier] <= quota
            assert quota - used < max(sizes.values()), "nothing more would fit"
            assert used == sum(f.stat().st_size for f in it.tiers[tier].copies.iterdir())


@pytest.mark.parametrize("checksum", [False, True])
def test_the_next_run_uses_the_copies_without_reading_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checksum: bool
) -> None:
    write_files(tmp_path / "source", {"a": 60, "b": 50})
    with rig(tmp_path, 200, checksum=checksum) as it:
        it.open("a", "b")
    (tmp_path / "source" / "b").write_bytes(os.urandom(40))
    age(tmp_path / "source" / "b", 1000)
    read = []

    def watched(path: Path, *rest: Any, **more: Any) -> None:
        read.append(path.name)
        copier.copy_file(path, *rest, **more)

    monkeypatch.setattr(placer, "copy_file", watched)
    with rig(tmp_path, 200, checksum=checksum) as it:
        assert it.placer.rooms.used() == [110]
        it.open("a", "b")
        it.copy("a"), it.copy("b")
        assert read == ["b"], "it has changed since"
        assert it.placer.rooms.used() == [100]
        assert it.placer.counts.tiers[0].reused == 1


def test_a_damaged_copy_is_found_by_its_checksum(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 60})
    with rig(tmp_path, 200, checksum=True) as it:
        it.open("a")
        copy, status = it.copy("a"), it.copy("a").stat()
    copy.chmod(0o600)
    copy.write_bytes(b"x" * 60)
    os.utime(copy, ns=(status.st_mtime_ns, status.st_mtime_ns))
    with rig(tmp_path, 200, checksum=True) as it:
        it.open("a")
        it.copy("a")
        assert it.placer.rooms.used() == [60]


def test_garbage_in_the_marked_directory(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 60, "b/c": 50, "d": 10, "e": 10})
    with rig(tmp_path, 300) as it:
        it.open("a")
    tier = tmp_path / "tier0"
    (tmp_path / "outside").write_text("precious")
    (tier / "parts" / "17").write_bytes(b"half a copy")
    (tier / "parts" / "notes.txt").write_bytes(b"somebody's")
    (tier / "unknown").write_text("somebody's")
    (tier / "copies" / "b").write_bytes(b"a file where a folder must be")
    (tier / "copies" / "d").mkdir()
    (tier / "copies" / "e").symlink_to(tmp_path / "outside")
    (tier / "copies" / "f").symlink_to(tmp_path)
    it2 = Rig(tmp_path, (300,))
    try:
        it2.open("a", "b/c", "d", "e")
        it2.copy("a")
        assert it2.states("b/c", "d") == [State.REFUSED, State.REFUSED]
        assert not it2.placer.rooms.rests(0), "the tier is well"
        assert (tmp_path / "outside").read_text() == "precious"
        assert it2.placer.rooms.used()[0] <= 300
        assert {p.name for p in (tier / "parts").iterdir()} == {"notes.txt"}
        assert (tier / "unknown").read_text() == "somebody's"
    finally:
        it2.close()


def test_a_file_that_is_young_or_empty_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "source", {"empty": 0, "young": 10})
    os.utime(tmp_path / "source" / "young")
    monkeypatch.setattr(placer, "_YOUNG", 1.0)
    with rig(tmp_path, 100) as it:
        it.open("empty", "young")
        assert it.states("empty", "young") == [State.REFUSED] * 2

        def may_be_asked_again() -> bool:
            it.placer.tick()
            return it.states("young") == [State.DROPPED]

        wait_for(may_be_asked_again)
        it.open("young")
        it.copy("young")
        assert it.states("empty") == [State.REFUSED]


def test_what_is_no_file_gets_no_entry(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"folder/a": 10})
    os.mkfifo(tmp_path / "source" / "pipe")
    with rig(tmp_path, 100) as it:
        it.open("folder", "pipe", "none")
        assert len(it.table) == 0


def test_a_link_is_noted(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 10})
    (tmp_path / "source" / "link").symlink_to("a")
    with rig(tmp_path, 100) as it:
        it.open("a", "link")
        assert [it.entry(name)["link"] for name in ("a", "link")] == [0, 1]
        it.copy("link")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_tier_that_fails_rests_and_the_next_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write_files(tmp_path / "source", {"a": 3 << 20, "b": 10, "c": 10})
    monkeypatch.setattr(placer, "_PAUSE", 0.01)
    real_write, tier0 = os.write, tmp_path / "tier0"
    sick = [True]

    def write(fd: int, data: Any) -> int:
        if sick[0] and Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(tier0):
            if os.lseek(fd, 0, os.SEEK_CUR) == 0 and len(data) > 10:
                return real_write(fd, data[:100])  # full in the middle
            raise OSError(number, os.strerror(number))
        return real_write(fd, data)

    monkeypatch.setattr(copier.os, "write", write)
    with rig(tmp_path, 4 << 20, 4 << 20) as it:
        it.open("a")
        assert it.states("a") == [State.REFUSED] and it.placer.rooms.used() == [0, 0]
        it.open("b")
        assert it.copy("b").is_relative_to(tmp_path / "tier1")

        def may_be_asked_again() -> bool:
            it.placer.tick()
            return it.states("a") == [State.DROPPED]

        wait_for(may_be_asked_again)
        it.open("a")
        assert it.copy("a").is_relative_to(tmp_path / "tier1")
        sick[0] = False
        it.placer.rooms._rooms[0].rests_until = 0.0
        it.open("c")
        assert it.copy("c").is_relative_to(tmp_path / "tier0")
        assert it.placer.counts.tiers[0].failures == 1
        assert os.strerror(number) in str(dict(it.placer.counts.problems))


def test_files_refused_while_a_tier_rested_may_be_asked_for_again(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 10})
    with rig(tmp_path, 100) as it:
        it.placer.rooms.failed(0)
        it.open("a")
        assert it.states("a") == [State.REFUSED]
        it.placer.tick()
        assert it.states("a") == [State.REFUSED]
        it.placer.rooms._rooms[0].rests_until = 0.0
        it.placer.tick()
        assert it.states("a") == [State.DROPPED]
        it.open("a")
        it.copy("a")


def test_a_copy_that_keeps_failing_is_left_alone_and_its_room_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "source", {"bad": 50, "good": 100})
    monkeypatch.setattr(placer, "_PAUSE", 0.001)
    attempts = []

    def broken(source: Path, *rest: Any, **more: Any) -> None:
        if source.name == "bad":
            attempts.append(source)
            raise OSError(errno.EIO, "input/output error")
        copier.copy_file(source, *rest, **more)

    monkeypatch.setattr(placer, "copy_file", broken)
    with rig(tmp_path, 100) as it:
        it.open("bad")
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:  # a program that opens it all the time
            it.placer.tick()
            if it.states("bad") == [State.DROPPED]:
                it.open("bad")
        assert len(attempts) == 3 and it.states("bad") == [State.REFUSED]
        it.open("good")
        it.copy("good")
        assert it.placer.counts.failed == 3 and it.placer.counts.refused == 1


def test_a_source_that_changes_is_placed_anew(tmp_path: Path) -> None:
    source = tmp_path / "source" / "a"
    write_files(tmp_path / "source", {"a": 60})
    with rig(tmp_path, 100) as it:
        it.open("a")
        old = it.table.find(b"a")
        assert old is not None
        before = it.copy("a").read_bytes()
        with it.copy("a").open("rb") as reading:
            it.placer.changed(old)
            it.settle()
            assert it.table.find(b"a") == old, "a false alarm changes nothing"
            source.write_bytes(os.urandom(70))
            age(source, 100)
            it.placer.changed(old)
            it.placer.changed(old)
            it.settle()
            assert it.table.state(old) is State.DROPPED
            assert reading.read() == before, "who has it open keeps what it was"
        it.copy("a")
        assert it.placer.rooms.used() == [70] and it.placer.counts.dropped == 1
        source.unlink()
        it.placer.changed(it.table.find(b"a") or 0)
        it.settle()
        assert it.states("a") == [State.DROPPED] and it.placer.rooms.used() == [0]
        assert not list(it.tiers[0].copies.iterdir())


def test_a_source_that_changes_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source" / "a"
    write_files(tmp_path / "source", {"a": 3 << 20})
    monkeypatch.setattr(placer, "_PAUSE", 0.001)

    def change_once(*arguments: Any, **more: Any) -> None:
        progress = more.pop("progress")

        def changing(done: int) -> None:
            if done == 1 << 20 and source.stat().st_size == 3 << 20:
                os.truncate(source, 2 << 20)
                age(source, 60)
            progress(done)

        copier.copy_file(*arguments, progress=changing, **more)

    monkeypatch.setattr(placer, "copy_file", change_once)
    with rig(tmp_path, 4 << 20) as it:
        it.open("a")
        assert it.states("a") == [State.REFUSED] and it.placer.rooms.used() == [0]
        it.open("a")
        it.copy("a")


def test_a_copy_that_has_gone_is_made_again(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 60})
    with rig(tmp_path, 100) as it:
        it.open("a")
        it.copy("a").unlink()
        it.placer.changed(it.table.find(b"a") or 0)
        it.settle()
        it.copy("a")
        assert it.placer.rooms.used() == [60]


def test_a_tier_that_vanishes_is_not_used_any_more(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 60, "b": 60})
    with rig(tmp_path, 100, 100) as it:
        it.open("a")
        shutil.rmtree(tmp_path / "tier0")
        it.placer.tick()
        assert it.states("a") == [State.DROPPED]
        it.open("a")
        assert it.entry("a")["tier"] == 1
        it.copy("a")
        it.open("b")
        assert it.states("b") == [State.REFUSED]
        assert any("vanished" in problem for problem in it.placer.counts.problems)
        (tmp_path / "tier0" / "parts").mkdir(parents=True)


def test_files_of_the_order_come_first(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 40, "b": 40, "big": 500, "c": 40, "d": 20})
    with rig(tmp_path, 100) as it:
        assert it.placer.promise([b"c", b"none", b"big", b"b"]) == 2
        it.open("a", "d")
        assert it.states("a", "d") == [State.REFUSED, State.PLACED]
        it.copy("c"), it.copy("b")
        assert it.placer.rooms.used() == [100]


def test_promised_room_is_given_back_when_a_file_has_another_size_by_then(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 40})
    with rig(tmp_path, 100) as it:
        it.placer._promised[b"a"] = (it.placer.rooms.reserve(90) or 0, 90)
        it.open("a")
        it.copy("a")
        assert it.placer.rooms.used() == [40]


def test_closing_in_the_middle_of_a_copy_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "source", {"a": 8 << 20})
    with rig(tmp_path, 16 << 20) as it:
        slow = os.write

        def write(fd: int, data: Any) -> int:
            time.sleep(0.05)
            return slow(fd, data)

        monkeypatch.setattr(copier.os, "write", write)
        it.placer.opened(b"a")
        wait_for(lambda: it.table.find(b"a") is not None and it.entry("a")["copied"] > 0)
        it.placer.close()
        assert it.entry("a")["state"] is not State.PLACED
        assert not list(it.tiers[0].copies.iterdir())

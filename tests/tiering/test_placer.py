"""Placement: who gets room, what is reused, what a failure costs. The table is the witness."""

from __future__ import annotations

import errno
import io
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from stoker.tiering import copier, placer, tier_dir
from stoker.tiering.config import Config, TierConfig
from stoker.tiering.layout import State
from stoker.tiering.placer import Placer
from stoker.tiering.table import Settings, Table, TierPaths
from stoker.tiering.tier_dir import TierDir
from tiering.conftest import age, write_files


class Rig:
    """A placer with its table and tiers."""

    def __init__(self, folder: Path, quotas: tuple[int, ...], **options: Any) -> None:
        self.source = folder / "source"
        tiers = tuple(TierConfig(folder / f"tier{i}", quota) for i, quota in enumerate(quotas))
        self.config = Config(self.source, tiers, self.source, **{"threads": 2, **options})
        self.tiers = [TierDir(tier.path, self.source) for tier in tiers]
        places = [TierPaths(tier.copies, tier.parts, tier.dev) for tier in self.tiers]
        (folder / "table").unlink(missing_ok=True)
        limits = Settings(0, 8 << 20, 16 << 20, 3_000, 2_000)
        root = self.source.stat()
        self.table = Table(folder / "table", [self.source], root, places, limits)
        self.placer = Placer(self.config, self.source, self.table, self.tiers)

    def open(self, *names: str) -> None:
        """Ask for files, and wait until all is settled."""
        for name in names:
            self.placer.opened(os.fsencode(name))
        self.settle()

    def settle(self) -> None:
        until(self.placer.is_idle)

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
        copy = self.tiers[entry["tier"]].called[0] / name
        status, original = copy.stat(), (self.source / name).stat()
        assert status.st_ino == entry["copy_ino"]
        assert (status.st_size, status.st_mtime_ns) == (original.st_size, original.st_mtime_ns)
        assert copy.read_bytes() == (self.source / name).read_bytes()
        return copy

    def close(self) -> None:
        self.placer.close()
        for tier in self.tiers:
            tier.close()


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

    def watched(path: Path, *rest: Any, **more: Any) -> copier.Origin:
        read.append(Path(path).name)
        return copier.copy_file(path, *rest, **more)

    monkeypatch.setattr(placer, "copy_file", watched)
    with rig(tmp_path, 200, checksum=checksum) as it:
        assert it.placer.rooms.used() == [110]
        it.open("a", "b")
        it.copy("a"), it.copy("b")
        assert read == ["b"], "it has changed since"
        assert it.placer.rooms.used() == [100]
        assert it.placer.counts.tiers[0].reused == 1


def test_t1_a_file_rebuilt_with_the_same_size_and_time_is_copied_again(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"in place": 60, "replaced": 60, "kept": 60})
    with rig(tmp_path, 200) as it:
        it.open("in place", "replaced", "kept")
    for name in ("in place", "replaced"):
        path = tmp_path / "source" / name
        normalised = path.stat().st_mtime_ns
        if name == "replaced":
            path.unlink()
        path.write_bytes(os.urandom(60))
        os.utime(path, ns=(normalised, normalised))
    with rig(tmp_path, 200) as it:
        it.open("in place", "replaced", "kept")
        for name in ("in place", "replaced", "kept"):
            it.copy(name)  # compares the bytes
        assert it.placer.counts.tiers[0].reused == 1
        assert it.placer.rooms.used() == [180]


@pytest.mark.parametrize("loss", ["gone", "damaged", "of another device"])
def test_a_copy_of_which_nothing_sure_is_known_is_made_again(tmp_path: Path, loss: str) -> None:
    write_files(tmp_path / "source", {"a": 60})
    with rig(tmp_path, 200) as it:
        it.open("a")
    origins = tmp_path / "tier0" / "origins.db"
    if loss == "gone":
        origins.unlink()
    elif loss == "damaged":
        origins.write_bytes(os.urandom(5000))
    else:
        rows = tier_dir.Origins(origins)
        was = rows.get(b"a")
        assert was is not None
        rows.put(b"a", was._replace(source=was.source._replace(device=2**64 - 1)))
        rows.close()
    with rig(tmp_path, 200) as it:
        it.open("a")
        it.copy("a")
        assert it.placer.counts.tiers[0].reused == 0 and it.placer.rooms.used() == [60]
    with rig(tmp_path, 200) as it:
        it.open("a")
        assert it.placer.counts.tiers[0].reused == 1, "and is known from then on"


def test_a_descriptor_of_the_program_is_copied_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage is not asked to open the file again; the program's offset stays where it is."""
    write_files(tmp_path / "source", {"a": 60, "b": 60, "large": 9 << 20})
    own = (tmp_path / "source" / "a").open("rb", buffering=0)
    own.seek(7)

    def refused(source: Path) -> None:
        raise OSError(errno.EIO, f"{source} is opened")

    with monkeypatch.context() as patched, rig(tmp_path, 10 << 20) as it:
        patched.setattr(copier, "_open", refused)
        it.placer.opened(b"a", io.FileIO(os.dup(own.fileno())))
        stream = (tmp_path / "source" / "large").open("rb", buffering=0)
        it.placer.opened(b"large", io.FileIO(os.dup(stream.fileno())))
        it.settle()
        it.copy("a"), it.copy("large")
        assert own.tell() == 7
        it.placer.opened(b"a", handed := io.FileIO(os.dup(own.fileno())))
        it.settle()
        assert handed.closed
    with rig(tmp_path, 10 << 20) as it:  # one of another file, as another mount namespace has it
        it.placer.opened(b"b", io.FileIO(os.dup(own.fileno())))
        it.settle()
        it.copy("b")
    own.close(), stream.close()


@pytest.mark.parametrize("small", [0, 16 << 20])
def test_t5_copying_waits_while_the_program_rushes_unless_its_opens_wait(
    tmp_path: Path, small: int
) -> None:
    write_files(tmp_path / "source", {"a": 3000})
    rig = Rig(tmp_path, (100_000,), small=small)
    rig.placer.hold(600)
    rig.placer.opened(b"a")
    if not small:
        time.sleep(0.1)
        assert not rig.placer.is_idle() and rig.table.find(b"a") is None
        rig.placer.hold(0)
    rig.settle()
    rig.copy("a")
    rig.close()


def test_t6_sources_of_copies_are_looked_at_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    write_files(source, {"kept": 60, "rebuilt": 60, "gone": 60, "unreachable": 60})
    with rig(tmp_path, 400) as it:
        it.open("kept", "rebuilt", "gone", "unreachable")
        numbers = [it.table.find(name) or 0 for name in (b"kept", b"rebuilt", b"gone")]
        seen = [it.table.entry(number)["validated_ns"] for number in numbers]
        longest_unseen = sorted(range(4), key=lambda n: it.table.entry(n)["validated_ns"])
        assert it.table.placed_before(2**63, 2) == longest_unseen[:2]
        assert it.table.placed_before(0, 2) == []
        normalised = (source / "rebuilt").stat().st_mtime_ns
        (source / "rebuilt").write_bytes(os.urandom(60))
        os.utime(source / "rebuilt", ns=(normalised, normalised))
        (source / "gone").unlink()
        for number in numbers:
            it.placer.revalidate(number)
        it.settle()
        assert it.states("kept", "gone") == [State.PLACED, State.DROPPED]
        it.copy("rebuilt")
        assert (it.placer.counts.checks, it.placer.counts.changes) == (3, 2)
        assert it.table.entry(numbers[0])["validated_ns"] > max(seen)
        # A source that does not answer is no reason to part with copies.
        real = Path.stat

        def silent(path: Path, **more: Any) -> os.stat_result:
            if path.name == "unreachable" and path.is_relative_to(source):
                raise OSError(errno.ETIMEDOUT, "no answer")
            return real(path, **more)

        monkeypatch.setattr(Path, "stat", silent)
        it.placer.revalidate(it.table.find(b"unreachable") or 0)
        monkeypatch.undo()
        it.settle()
        assert it.states("unreachable") == [State.PLACED]


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

        until(may_be_asked_again)
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

        until(may_be_asked_again)
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

    def broken(source: Path, *rest: Any, **more: Any) -> copier.Origin:
        if Path(source).name == "bad":
            attempts.append(source)
            raise OSError(errno.EIO, "input/output error")
        return copier.copy_file(source, *rest, **more)

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

    def change_once(*arguments: Any, **more: Any) -> copier.Origin:
        progress = more.pop("progress")

        def changing(done: int) -> None:
            if done == 1 << 20 and source.stat().st_size == 3 << 20:
                os.truncate(source, 2 << 20)
                age(source, 60)
            progress(done)

        return copier.copy_file(*arguments, progress=changing, **more)

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
        until(lambda: it.table.find(b"a") is not None and it.entry("a")["copied"] > 0)
        it.placer.close()
        assert it.entry("a")["state"] is not State.PLACED
        assert not list(it.tiers[0].copies.iterdir())

"""The directory of a disk cache: found again, shared, refused."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CapacityError, ConfigError, SegmentError, StateMismatch
from stoker.node import rendezvous
from stoker.policy.baselines import LRU, MinIO
from stoker.store import disk
from stoker.store.arena import payload_within
from stoker.store.disk import (
    CacheDir,
    DiskMeta,
    file_bytes,
    open_disk,
    shrink_unused,
    spare_bytes,
)

META = DiskMeta("data-1", 100, 50_000, 500)


@pytest.fixture(autouse=True)
def _own_runtime_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def place(tmp_path):
    return CacheDir(tmp_path / "deep" / "cache")


def open_it(place, meta=META, regions=None, **options):
    return open_disk(place, meta, regions or LRU().regions(), keep_free=0, **options)


def other(**changed):
    return DiskMeta(**{**vars(META), **changed})


def test_what_was_put_is_there_the_next_time(place):
    with open_it(place) as opened:
        assert opened.created
        opened.arena.put_many(range(100), [bytes([i]) * 500 for i in range(100)])
    assert place.segment.stat().st_size == file_bytes(META)
    assert place.read() == META
    with open_it(place, other(mean_size=499), MinIO().regions()) as opened:  # an estimate
        opened.arena.verify()
        assert opened.arena.stats()["entries"] == 100
        assert all(opened.arena.get(i) == bytes([i]) * 500 for i in range(100))


def test_jobs_share_it(place, tmp_path):
    (tmp_path / "link").symlink_to(place.path)
    with open_it(place) as first, open_it(CacheDir(tmp_path / "link")) as second:
        assert (first.created, second.created) == (True, False)
        first.arena.put(7, b"seven")
        assert second.arena.get(7) == b"seven"


def test_jobs_that_cannot_share_are_told(place, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_PATIENCE", 0.1)
    with open_it(place):
        monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "elsewhere"))
        with pytest.raises(SegmentError, match="in use by another process"):
            open_it(place)


def test_it_waits_for_those_who_are_leaving(place, monkeypatch):
    with open_it(place) as opened:
        left = os.dup(opened.arena.handle.fds[1])  # as a worker that has not noticed yet
    answers = [True, True, False]
    monkeypatch.setattr(CacheDir, "in_use", lambda self: answers.pop(0) or os.close(left) or False)
    open_it(place).close()
    assert not answers


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (other(key="data-2"), "made for the data set data-1, not the data set data-2"),
        (other(num_ids=101), "made for 100 samples, not 101 samples"),
        (other(capacity_bytes=60_000), r"48.8 KiB \(50000 bytes\), not .* 58.6 KiB \(60000 bytes"),
    ],
)
def test_it_is_not_taken_for_another(place, wanted, message):
    open_it(place).close()
    before = place.segment.read_bytes()
    with pytest.raises(StateMismatch, match=message) as caught:
        open_it(place, wanted)
    assert f"stoker clean {place.path}" in str(caught.value)
    assert place.segment.read_bytes() == before
    place.clean()
    open_it(place, wanted).close()  # made anew


@pytest.mark.parametrize("more", [{}, {"codec": "zstd"}])
def test_what_another_version_left_is_removed_with_a_message_and_made_again(place, caplog, more):
    with open_it(place) as opened:
        opened.arena.put(1, b"theirs")
    meta = place.path / "meta.json"
    meta.write_text(json.dumps(vars(META) | {"version": 99} | more))
    assert place.read().capacity_bytes == META.capacity_bytes
    with open_it(place) as opened:
        assert opened.arena.stats()["entries"] == 0
        opened.arena.put(2, b"ours")
    [record] = caplog.records
    assert f"{place.path} held samples in layout 99" in record.message
    assert place.read() == META
    with open_it(place) as opened:
        assert opened.arena.get(2) == b"ours"
    assert len(caplog.records) == 1


def test_what_a_job_of_another_version_uses_is_left_to_it(place, monkeypatch):
    monkeypatch.setattr(disk, "_LEAVING", 0.01)
    with open_it(place) as opened:
        opened.arena.put(1, b"theirs")
        meta = place.path / "meta.json"
        meta.write_text(json.dumps(vars(META) | {"version": 99}))
        monkeypatch.setattr(rendezvous, "_VERSION", 99)  # their jobs are not found
        with pytest.raises(SegmentError, match=r"another version of Stoker, with layout 99"):
            open_it(place)
        meta.write_text(json.dumps(vars(META)))
    with open_it(place) as opened:
        assert opened.arena.get(1) == b"theirs"


def test_while_a_job_has_it_open_another_data_set_is_refused_too(place):
    with open_it(place), pytest.raises(StateMismatch, match="data-2"):
        open_it(place, other(key="data-2"))


@pytest.mark.parametrize(
    "content",
    [
        *(None, "", "[1]", '{"key": 5}', "\0\0\0"),
        json.dumps(vars(other(mean_size=0))),  # by which its size could not be worked out
        json.dumps(vars(other(num_ids=0))),
    ],
)
def test_samples_that_nothing_describes_are_refused(place, content):
    open_it(place).close()
    meta = place.path / "meta.json"
    meta.unlink() if content is None else meta.write_text(content)
    with pytest.raises(StateMismatch, match="description is unreadable"):
        open_it(place)
    place.clean()
    open_it(place).close()


def test_a_creation_that_was_interrupted_leaves_nothing_to_heed(place):
    place.mark()
    place.describe(other(key="never finished"))
    open_it(place).close()
    assert place.read() == META


def test_a_directory_of_others_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"not empty and not Stoker's \(it holds 'thesis.tex'\)"):
        open_it(CacheDir(tmp_path / "mine"))
    with pytest.raises(ConfigError, match="not a disk cache of Stoker"):
        CacheDir(tmp_path / "mine").clean()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_new_file_system_is_fine(tmp_path):
    (tmp_path / "lost+found").mkdir()
    place = CacheDir(tmp_path)
    open_it(place).close()
    place.clean()
    assert (tmp_path / "lost+found").is_dir()


@pytest.mark.parametrize("path", ["/proc/nothing/here", "/dev/null", "/etc/hostname/cache"])
def test_paths_that_cannot_be(path):
    with pytest.raises(ConfigError, match=re.escape(path)):
        open_it(CacheDir(path))


def test_what_is_no_path():
    with pytest.raises(ConfigError, match="5 is not a path"):
        CacheDir(5)


def test_a_directory_that_may_not_be_written(place):
    place.mark()
    place.path.chmod(0o500)
    user = os.geteuid()
    try:
        if user == 0:
            place.path.parent.parent.chmod(0o755)
            os.seteuid(65534)
        with pytest.raises(ConfigError, match=r"may not be written|cannot be used"):
            open_it(place)
    finally:
        os.seteuid(user)


def test_the_floor(place):
    free = os.statvfs(place.path.parent.parent)
    room = free.f_blocks * free.f_frsize
    with pytest.raises(CapacityError, match=r"48\.8 KiB takes .* are to stay free") as caught:
        open_disk(place, META, LRU().regions(), keep_free=room)
    assert "smaller disk_size" in str(caught.value)
    assert place.read() is None, "nothing was made"
    open_it(place).close()
    # What is there already needs no room any more.
    open_disk(place, META, LRU().regions(), keep_free=room).close()


def test_a_floor_by_default(place, monkeypatch):
    total = 100 << 30
    fake = os.statvfs_result((4096, 4096, total // 4096, 0, (5 << 30) // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(disk.os, "statvfs", lambda path: fake)
    with pytest.raises(CapacityError, match=r"5\.0 GiB are free and 5\.0 GiB are to stay free"):
        open_disk(place, META, LRU().regions())


def test_cleaning_waits_and_then_says_who(place, monkeypatch):
    monkeypatch.setattr(disk, "_LEAVING", 0.1)
    with open_it(place), pytest.raises(SegmentError, match="is in use"):
        place.clean()
    assert place.clean() > 0
    assert list(place.path.iterdir()) == []


def test_two_that_settle_it_at_once(place, monkeypatch):
    monkeypatch.setattr(disk, "_OPENING", 0.1)
    place.mark()
    with place.locked(), pytest.raises(SegmentError, match="is busy with"), place.locked():
        pass


_DIES_HALFWAY = """
import resource, signal, sys
from stoker.policy.baselines import LRU
from stoker.store.disk import CacheDir, DiskMeta
from stoker.store.disk import open_disk

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills it within a call
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20, 100 << 20))
open_disk(CacheDir(sys.argv[1]), DiskMeta(*eval(sys.argv[2])), LRU().regions(), keep_free=0)
"""


def test_n1_a_job_killed_while_it_makes_the_segment(place):
    meta = DiskMeta("data-1", 20_000, 150 << 20, 8192)
    arguments = [str(place.path), repr((meta.key, meta.num_ids, meta.capacity_bytes, 8192))]
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", _DIES_HALFWAY, *arguments], check=False)
        assert ended.returncode == -signal.SIGXFSZ
        assert 0 < place.segment.stat().st_size < file_bytes(meta)
    with open_it(place, meta) as opened:
        opened.arena.put(7, b"seven")
        opened.arena.verify()
    assert place.segment.stat().st_size == file_bytes(meta)
    with open_it(place, meta) as opened:
        assert opened.arena.get(7) == b"seven"


# --- less than all of it ---


def test_it_begins_with_as_much_as_it_may_have(place):
    with open_it(place, limit_bytes=10_000) as opened:
        arena = opened.arena
        arena.put_many(range(100), [bytes([i]) * 500 for i in range(100)])
        assert arena.stats()["entries"] == 20
        assert arena.disk_bytes == file_bytes(META, 10_000) < file_bytes(META)
        assert arena.limit(50_000) == arena.disk_bytes == file_bytes(META)
        arena.put_many(range(100), [bytes([i]) * 500 for i in range(100)])
        assert arena.stats()["entries"] == 100
    with pytest.raises(ConfigError):
        arena.limit(-1)


def test_what_no_process_uses_gives_disk_back_and_keeps_the_youngest(place):
    meta = other(num_ids=1000, capacity_bytes=5_000_000, mean_size=5000)
    with open_it(place, meta) as opened:
        for i in range(1000):
            opened.arena.put(i, i.to_bytes(2, "little") * 2500)
        with pytest.raises(SegmentError, match="in use"):
            shrink_unused(place, 0)
    left = shrink_unused(place, 1_000_000)
    assert left == file_bytes(meta, 1_000_000)
    assert place.segment.stat().st_blocks * 512 < left + 64 * 1024
    with open_it(place, meta) as opened:
        opened.arena.verify()
        kept = [i for i in range(1000) if opened.arena.get(i)]
        assert kept[-190:] == list(range(810, 1000))
        assert len(kept) < 300, "more is there only where it lay before the end"
        assert all(opened.arena.get(i) == i.to_bytes(2, "little") * 2500 for i in kept)
        assert opened.arena.disk_bytes == file_bytes(meta)


def test_what_gave_disk_back_takes_no_more_than_the_disk_can_spare(place):
    """It took all that it once had, and left nothing free to others."""
    meta = other(num_ids=1000, capacity_bytes=5_000_000, mean_size=5000)
    open_it(place, meta).close()
    left = shrink_unused(place, 1_000_000)
    free = os.statvfs(place.path)
    with open_disk(place, meta, LRU().regions(), keep_free=free.f_blocks * free.f_frsize) as opened:
        assert opened.arena.disk_bytes <= left + 64 * 1024
        assert place.segment.stat().st_blocks * 512 < left + 64 * 1024
        opened.arena.put_many(range(1000), [b"x" * 5000] * 1000)
        assert opened.arena.io_errors == 0
        assert 190 < opened.arena.stats()["entries"] < 220
        assert opened.arena.limit(5_000_000) == file_bytes(meta)
    with open_it(place, meta) as opened:
        assert opened.arena.disk_bytes == file_bytes(meta)


def test_what_another_process_opens_is_not_waited_for(place):
    with open_it(place):
        pass
    with place.locked(), pytest.raises(SegmentError, match="is busy with"):
        shrink_unused(CacheDir(place.path), 0)


def test_what_another_version_left_is_not_shrunk(place):
    with open_it(place):
        pass
    facts = json.loads((place.path / "meta.json").read_text())
    (place.path / "meta.json").write_text(json.dumps({**facts, "version": 1}))
    with pytest.raises(SegmentError, match="another version"):
        shrink_unused(place, 0)
    assert place.segment.stat().st_size == file_bytes(META)


def test_room_of_the_file_system_is_asked_by_path_or_descriptor(place, tmp_path):
    with open_it(place) as opened:
        file = opened.arena.handle.fds[1]
        assert spare_bytes(file, 0) == pytest.approx(spare_bytes(tmp_path, 0), rel=0.1)
        assert spare_bytes(file, 0) > spare_bytes(file)


@given(st.integers(0, 3_000_000), st.integers(1, 2_000_000), st.integers(1, 30_000))
def test_so_much_payload_fits_and_no_more(size, capacity, mean_size):
    meta = DiskMeta("data", 50, capacity, mean_size)
    payload = payload_within(size, capacity, partial(file_bytes, meta))
    assert payload == 0 or file_bytes(meta, payload) <= size
    assert payload == capacity or file_bytes(meta, payload + 1) > size

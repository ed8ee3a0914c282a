"""FileSource: conformance, what becomes of files that change, and what it costs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes import warm

from stoker.errors import (
    ConfigError,
    SampleCorrupt,
    SampleNotFound,
    SourceError,
    SourceUnavailable,
)
from stoker.source import FileSource, Source
from stoker.source.packed import unpack
from stoker.testing import SourceConformance


def write(folder: Path, samples: list[bytes]) -> list[Path]:
    paths = [folder / f"{number:04d}.bin" for number in range(len(samples))]
    for path, sample in zip(paths, samples, strict=True):
        path.write_bytes(sample)
    return paths


class TestFileSource(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        return FileSource(write(tmp_path, samples))


class TestFileSourceThatDropsPages(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        return FileSource(iter(write(tmp_path, samples)), threads=1, drop_page_cache=True)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return write(tmp_path, [b"zero", b"one", b"two", b"three"])


def test_paths_may_be_of_any_kind_and_relative(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(paths[0].parent)
    mixed = [
        str(paths[0]),
        os.fsencode(paths[1]),
        Path("0002.bin"),
        "../" + paths[3].parent.name + "/0003.bin",
    ]
    source = FileSource(mixed)
    monkeypatch.chdir("/")
    assert source.read([0, 1, 2, 3]) == [b"zero", b"one", b"two", b"three"]
    assert Path(source.name(2)) == paths[2]


def test_names_that_are_not_text_work(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\xfe \n.bin"
    Path(os.fsdecode(path)).write_bytes(b"x")
    source = FileSource([path])
    assert source.read([0]) == [b"x"]
    assert os.fsencode(source.name(0)) == path


def test_fingerprint_is_that_of_the_storage_not_of_the_mount(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = FileSource(write(tmp_path / "a", [b"x", b"y"])).fingerprint
    (tmp_path / "a").rename(tmp_path / "somewhere else")
    moved = sorted((tmp_path / "somewhere else").iterdir())
    assert FileSource(moved).fingerprint == first
    assert FileSource(moved[::-1]).fingerprint != first


def test_fingerprint_changes_with_a_file_of_the_same_size(paths: list[Path]) -> None:
    first = FileSource(paths).fingerprint
    paths[2].write_bytes(b"TWO")
    os.utime(paths[2], ns=(0, 1_700_000_000_000_000_001))
    second = FileSource(paths).fingerprint
    os.utime(paths[2], ns=(0, 1_700_000_000_000_000_002))
    assert len({first, second, FileSource(paths).fingerprint}) == 3


@pytest.mark.parametrize(
    ("content", "error", "verb"),
    [
        (b"tw", SampleCorrupt, "shrank"),
        (b"twoo", SampleCorrupt, "grew"),
        (None, SampleNotFound, ""),
    ],
)
def test_a_file_that_changed_is_reported_and_the_others_are_read(
    paths: list[Path], content: bytes | None, error: type[SourceError], verb: str
) -> None:
    source = FileSource(paths)
    if content is None:
        paths[2].unlink()
    else:
        paths[2].write_bytes(content)
    with pytest.raises(error, match=f"0002.bin.*{verb}") as caught:
        source.read([1, 2, 3, 2])
    assert caught.value.ids == [2, 2]
    samples, errors = source.read_each([1, 2, 3, 2])
    assert samples == [b"one", None, b"three", None]
    data, offsets, packed_errors = source.read_packed([1, 2, 3, 2])
    assert unpack(data, offsets) == [b"one", b"", b"three", b""]
    for found in (errors, packed_errors):
        assert set(found) == {1, 3}
        assert all(type(e) is error and e.ids == [2] for e in found.values())


def test_a_directory_in_the_place_of_a_file_is_reported(paths: list[Path]) -> None:
    source = FileSource(paths)
    paths[1].unlink()
    paths[1].mkdir()
    with pytest.raises(SampleCorrupt, match="not a regular file"):
        source.read([1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from stoker.source import FileSource\n"
        "source = FileSource(sys.argv[1:])\n"
        "os.setuid(65534)\n"
        "print(source.read_each([0, 1]))\n"
    )
    secret, plain = write(tmp_path, [b"secret", b"plain"])
    secret.chmod(0)
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", code, secret, plain], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("([None, b'plain'], {0: SourceUnavailable(")
    assert "Permission denied: let this user (id 65534) read it" in done.stdout


def test_bad_input_is_refused(paths: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one file"):
        FileSource([])
    with pytest.raises(ConfigError, match="give a list"):
        FileSource(str(paths[0]))
    with pytest.raises(ConfigError, match="not a path"):
        FileSource([paths[0], 3])
    with pytest.raises(ConfigError, match="NUL"):
        FileSource([paths[0], "a\0b"])
    with pytest.raises(SampleNotFound, match="nothing here"):
        FileSource([*paths, tmp_path / "nothing here"])
    with pytest.raises(SampleCorrupt, match="not a regular file"):
        FileSource([*paths, tmp_path])
    for threads in (0, -1, 1025):
        with pytest.raises(ConfigError, match=str(threads)):
            FileSource(paths, threads=threads)


def test_other_failures_of_the_storage_are_unavailable(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceUnavailable, match="loop"):
        FileSource([tmp_path / "loop"])


def test_no_descriptor_is_left_open(paths: list[Path]) -> None:
    source = FileSource(paths)
    before = len(list(Path("/proc/self/fd").iterdir()))
    (paths[0]).unlink()
    for _ in range(50):
        source.read_each([0, 1, 2, 3])
    assert (
        len(list(Path("/proc/self/fd").iterdir())) <= before
    )  # fewer: what other tests left has gone


def test_closing_stops_the_threads(paths: list[Path]) -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    source = FileSource(paths * 20, threads=7)
    source.read(np.arange(80))
    assert len(list(Path("/proc/self/task").iterdir())) == before + 7
    source.close()
    assert len(list(Path("/proc/self/task").iterdir())) == before


def _pickled_size(source: FileSource) -> int:
    """What a spawned child is sent, as multiprocessing would pickle it."""
    from multiprocessing import context

    class Recorder:
        def duplicate_for_child(self, fd: int) -> int:
            return fd

        DupFd = int

    context.set_spawning_popen(Recorder())
    try:
        return len(pickle.dumps(source))
    finally:
        context.set_spawning_popen(None)


def test_what_children_are_sent_does_not_grow_with_the_files(paths: list[Path]) -> None:
    small, large = FileSource(paths), FileSource(paths * 5000)
    assert _pickled_size(large) <= _pickled_size(small) + 20


def _check_closed(source: FileSource) -> None:
    with pytest.raises(ConfigError, match="closed"):
        source.read([0])


def test_a_closed_source_stays_closed_in_a_child(paths: list[Path]) -> None:
    source = FileSource(paths)
    source.close()
    child = warm.Process(target=_check_closed, args=(source,))
    child.start()
    child.join()
    assert child.exitcode == 0


def test_exit_with_busy_reads_does_not_hang(paths: list[Path]) -> None:
    code = (
        "import sys, threading, time\n"
        "from stoker.source import FileSource\n"
        "source = FileSource(sys.argv[1:] * 100)\n"
        "def work():\n"
        "    while True: source.read_packed(range(len(source)))\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *paths], timeout=60, check=False)
    assert done.returncode == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    ops=st.lists(
        st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 6), st.just("restore"))),
        max_size=12,
    ),
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=12),
)
def test_any_history_of_changes_is_seen_file_by_file(
    tmp_path: Path, ops: list[tuple[int, int | str | None]], ids: list[int]
) -> None:
    """A file counts as good exactly when it has the size that was listed."""
    contents = {n: bytes([65 + n]) * n for n in range(5)}
    paths = write(tmp_path, list(contents.values()))
    source = FileSource(paths)
    state: dict[int, bytes | None] = dict(contents)
    for number, change in ops:
        paths[number].unlink(missing_ok=True)
        if change is None:
            state[number] = None
            continue
        state[number] = contents[number] if change == "restore" else b"z" * int(change)
        paths[number].write_bytes(state[number])
    samples, errors = source.read_each(ids)
    for index, number in enumerate(ids):
        now = state[number]
        if now is None:
            assert samples[index] is None
            assert type(errors[index]) is SampleNotFound
        elif len(now) != len(contents[number]):
            assert samples[index] is None
            assert type(errors[index]) is SampleCorrupt
        else:
            assert samples[index] == now
            assert index not in errors


def test_files_in_the_page_cache_are_at_hand(paths: list[Path]) -> None:
    """As far as this file system tells: others say that nothing is."""
    ids = np.arange(4, dtype=np.uint32)
    for path in paths:
        path.read_bytes()
    source = FileSource(paths)
    assert source.at_hand(ids[:0]) == 0
    share = source.at_hand(ids)
    assert 0 <= share <= 1
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    assert source.at_hand(ids) <= share
    paths[0].unlink()
    assert source.at_hand(ids[:1]) == 0
    assert FileSource(paths[1:], drop_page_cache=True).at_hand(ids[:3]) == 0

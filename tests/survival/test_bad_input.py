"""What an arena refuses: a typed error that names the value, and nothing left behind."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import CapacityError, ConfigError, SegmentError
from stoker.node.memory import read_memory
from stoker.store import arena as arena_module
from stoker.store.arena import Arena, Handle

NAN, INF = float("nan"), float("inf")
_ABI_AT = 8  # bytes into a segment's header, after the magic number


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(10, 10_000, 100) as made:
        yield made
        made.verify()


@contextmanager
def same_descriptors() -> Iterator[None]:
    folder = Path("/proc/self/fd")
    before = sorted(path.name for path in folder.iterdir())
    yield
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_ids": 0},
        {"num_ids": -1},
        {"num_ids": 2**32},
        {"num_ids": NAN},
        {"capacity_bytes": -1},
        {"capacity_bytes": 2**70},
        {"mean_size": 0},
        {"mean_size": -100},
        {"mean_size": NAN},
        {"mean_size": INF},
        {"mean_size": 1e300},
    ],
    ids=str,
)
def test_refused_sizes(arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    good = {"num_ids": 10, "capacity_bytes": 1000, "mean_size": 100}
    with same_descriptors(), pytest.raises(ConfigError, match=f"{name}=.*give") as refused:
        Arena(**(good | arguments))
    assert str(value) in str(refused.value)


def test_a_cache_of_no_bytes_keeps_only_what_has_none() -> None:
    with Arena(10, 0, 100) as arena:
        assert arena.put_many([1, 2], [b"x", b""]).tolist() == [False, True]
        assert (arena.get(1), arena.get(2)) == (None, b"")
        arena.verify()


def test_a_sample_larger_than_the_cache_is_not_kept(arena: Arena) -> None:
    assert arena.claim([1]).all()
    assert not arena.put(1, bytes(10_001))
    assert arena.claim([1]).all(), "the claim was given back"
    assert arena.put(1, bytes(10_000))


# Memory


def test_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with same_descriptors(), pytest.raises(CapacityError, match=r"TiB .* free here") as refused:
        Arena(10, 2**50, 100)
    assert "smaller cache" in str(refused.value)


@pytest.mark.parametrize("version", [1, 2])
def test_more_than_a_cgroup_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int
) -> None:
    """The limit sits on the parent of this process's group, as a container's does."""
    kind, names = {
        1: ("cgroup cgroup rw,memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        2: ("cgroup2 cgroup2 rw", ("memory.max", "memory.current")),
    }[version]
    controllers = {1: "4:memory", 2: "0:"}[version]
    files = {
        "proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB",
        "proc/self/mountinfo": f"30 24 0:26 / {tmp_path}/groups rw - {kind}",
        "proc/self/cgroup": f"{controllers}:/pod/job",
        f"groups/pod/{names[0]}": str(64 << 20),
        f"groups/pod/{names[1]}": str(48 << 20),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(arena_module, "read_memory", lambda: read_memory(tmp_path / "proc"))
    with pytest.raises(CapacityError, match=r"20\.0 MiB .* 16\.0 MiB are free"):
        Arena(100, 20 << 20, 1 << 20)
    Arena(100, 8 << 20, 1 << 20).close()


_IN_GROUP = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from stoker.errors import CapacityError
from stoker.store.arena import Arena
try:
    Arena(1000, 512 << 20, 1 << 20)
except CapacityError as error:
    print(error, flush=True)
small = Arena(1000, 16 << 20, 1 << 20)
assert small.put(1, bytes(1 << 20)) and len(small.get(1)) == 1 << 20
print("alive")
"""


@contextmanager
def _real_group(limit: int) -> Iterator[Path]:
    """A group with a memory limit; skips where none can be made."""
    roots = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    names = ["memory.limit_in_bytes", "memory.max"]
    for root, name in zip(roots, names, strict=True):
        group = root / f"stoker-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                (group / name).write_text(str(limit))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a memory cgroup")
def test_more_than_a_real_cgroup_allows() -> None:
    with _real_group(256 << 20) as group:
        ran = subprocess.run(
            [sys.executable, "-c", _IN_GROUP, str(group)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    refused, alive = ran.stdout.splitlines()
    assert "a cache of 512.0 MiB" in refused and "smaller cache" in refused
    assert alive == "alive"


def test_an_address_space_limit_leaves_no_memory_behind() -> None:
    code = """
import os, resource
from stoker.errors import CapacityError
from stoker.store.arena import Arena
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
before = os.listdir("/proc/self/fd")
try:
    Arena(10, 128 << 20, 1 << 20)
except CapacityError as error:
    print(error)
assert os.listdir("/proc/self/fd") == before
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Cannot allocate memory" in ran.stdout


# Arguments of calls

BAD_IDS = [[10], [-1], [2**40], [1.0], [[1]], 3, "12", np.array([10], np.uint32), [0, 3, 99]]
CALLS: list[Callable[[Arena, Any], Any]] = [
    lambda arena, ids: arena.get_many(ids),
    lambda arena, ids: arena.put_many(ids, [b""] * np.size(ids)),
    lambda arena, ids: arena.contains(ids),
    lambda arena, ids: arena.claim(ids),
    lambda arena, ids: arena.abandon(ids),
    lambda arena, ids: arena.wait(ids, 0.1),
    lambda arena, ids: arena.discard(ids),
    lambda arena, ids: arena.keys(ids),
    lambda arena, ids: arena.set_keys(ids, [1.0] * np.size(ids)),
    lambda arena, ids: arena.lease(ids, 1),
]


@pytest.mark.parametrize("ids", BAD_IDS, ids=str)
def test_ids_that_are_none(arena: Arena, ids: Any) -> None:
    for call in CALLS:
        with pytest.raises(ConfigError, match=r"give (ids from 0 to 9|u32\[n\])"):
            call(arena, ids)
    assert arena.stats()["entries"] == 0
    assert arena.claim(range(10)).all(), "no claim was taken by a call that was refused"
    arena.abandon(range(10))


U8 = np.zeros(10, np.uint8)
BAD_CALLS: dict[str, Callable[[Arena], Any]] = {
    "fewer samples": lambda arena: arena.put_many([1, 2], [b"a"]),
    "more samples": lambda arena: arena.put_many([1], [b"a", b"b"]),
    "fewer keys": lambda arena: arena.put_many([1, 2], [b"a", b"b"], [1.0]),
    "two-dimensional keys": lambda arena: arena.put_many([1], [b"a"], [[1.0]]),
    "NaN": lambda arena: arena.put(1, b"a", NAN),
    "NaN for set_keys": lambda arena: arena.set_keys([1], [NAN]),
    "fewer keys for set_keys": lambda arena: arena.set_keys([1, 2], [1.0]),
    "fewer offsets": lambda arena: arena.put_many([1, 2], (U8, np.array([0, 5]))),
    "negative offsets": lambda arena: arena.put_many([1], (U8, np.array([-1, 5]))),
    "falling offsets": lambda arena: arena.put_many([1, 2], (U8, np.array([0, 5, 3]))),
    "offsets beyond": lambda arena: arena.put_many([1], (U8, np.array([0, 11]))),
    "offsets that are no integers": lambda arena: arena.put_many([1], (U8, np.array([0, 0.5]))),
    "two-dimensional offsets": lambda arena: arena.put_many([1], (U8, np.zeros((2, 2), int))),
    "data that is no bytes": lambda arena: arena.put_many([1], (np.ones(9), np.array([0, 5]))),
    "unknown region": lambda arena: arena.put_many([1], [b"a"], region="nowhere"),
    "NaN seconds": lambda arena: arena.wait([1], NAN),
    "negative seconds": lambda arena: arena.wait([1], -0.1),
    "negative region": lambda arena: arena.add_region("x", -1),
    "region too large": lambda arena: arena.add_region("x", 10**9),
    "region without a name": lambda arena: arena.add_region("", 1),
    "long name": lambda arena: arena.add_region("x" * 50, 1),
    "same name": lambda arena: arena.add_region("main", 1),
    "unknown order": lambda arena: arena.add_region("x", 1, order="best"),  # type: ignore[arg-type]
    "negative visits": lambda arena: arena.add_region("x", 1, visits=-1),
    "resize unknown": lambda arena: arena.resize_region("x", 1),
    "resize too large": lambda arena: arena.resize_region("main", 10**9),
    "resize negative": lambda arena: arena.resize_region("main", -1),
    "no regions": lambda arena: arena.configure([]),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_refused_calls(arena: Arena, name: str) -> None:
    with pytest.raises(ConfigError, match=r"give|use|shrink|name|regions are|lie in"):
        BAD_CALLS[name](arena)
    assert arena.stats()["entries"] == 0


@pytest.mark.parametrize("bad", ["text", None, 1.5, np.zeros(4)[::2]], ids=str)
def test_samples_that_are_no_bytes_let_go_of_the_others(arena: Arena, bad: Any) -> None:
    good = bytearray(b"good")
    with pytest.raises((TypeError, BufferError, ValueError)):
        arena.put_many([1, 2], [good, bad])
    good.append(0)  # an error while something still refers to its memory
    assert not arena.contains([1, 2]).any()


def test_infinite_patience_waits(arena: Arena) -> None:
    assert arena.wait([1], INF).tolist() == [False]  # nobody is at work on it
    arena.put(1, b"a")
    assert arena.wait([1], INF).all()


# Segments


def test_after_close_everything_is_refused() -> None:
    arena = Arena(10, 1000, 100)
    handle = arena.handle
    arena.close()
    arena.close()
    calls: list[Callable[[], Any]] = [
        *(lambda call=call: call(arena, [1]) for call in CALLS),  # type: ignore[misc]
        lambda: arena.get(1),
        lambda: arena.release(1),
        lambda: arena.stats(),
        lambda: arena.verify(),
        lambda: arena.reclaim(),
        lambda: arena.handle,
        lambda: arena.num_ids,
        lambda: arena.capacity_bytes,
        lambda: arena.overhead_bytes,
        lambda: arena.add_region("x", 1),
        lambda: arena.resize_region("main", 1),
        lambda: Arena.attach(handle),
    ]
    for call in calls:
        with pytest.raises(SegmentError):
            call()


def test_a_segment_of_another_version(arena: Arena) -> None:
    (fd,) = arena.handle.fds
    found = os.pread(fd, 4, _ABI_AT)
    assert struct.unpack("<I", found) == (arena.handle.meta["abi"],)
    os.pwrite(fd, struct.pack("<I", 99), _ABI_AT)
    with same_descriptors(), pytest.raises(SegmentError, match=r"version 99.*same Stoker"):
        Arena.attach(arena.handle)
    os.pwrite(fd, found, _ABI_AT)
    Arena.attach(arena.handle).close()


def test_a_segment_that_is_cut_short(arena: Arena) -> None:
    (fd,) = arena.handle.fds
    copy = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    try:
        os.write(copy, os.pread(fd, os.fstat(fd).st_size - 4096, 0))
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with same_descriptors(), pytest.raises(SegmentError, match="truncated"):
            Arena.attach(Handle((copy,), {}))
    finally:
        os.close(copy)


def test_descriptors_of_other_things(arena: Arena) -> None:
    (own,) = arena.handle.fds
    receive, send = os.pipe()
    folder, program = os.open("/usr", os.O_RDONLY), os.open(sys.executable, os.O_RDONLY)
    empty = os.memfd_create("empty")
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 20))
        file.flush()
        handles = [(receive,), (folder,), (program,), (empty,), (file.fileno(),), (own, empty)]
        handles += [(), (-1,), (1 << 20,), (own, 1 << 20), (own, own, own)]
        for fds in handles:
            with same_descriptors(), pytest.raises(SegmentError):
                Arena.attach(Handle(fds, {}))
    for fd in (receive, send, folder, program, empty):
        os.close(fd)


def test_a_file_that_is_no_segment(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    path.write_bytes(bytes(range(256)) * 64)
    with same_descriptors(), pytest.raises(SegmentError, match="samples"):
        Arena(10, 10_000, 100, path)
    assert path.read_bytes() == bytes(range(256)) * 64
    with same_descriptors(), pytest.raises(SegmentError, match="missing"):
        Arena(10, 10_000, 100, tmp_path / "missing" / "samples")

"""Directories and object stores as depots, by the same tests; and what only one of them does."""

from __future__ import annotations

import errno
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

import pytest
from bundles_bench import FarDepot
from support.s3 import Bucket

from stoker.bundles.depot import (
    MARKER,
    Depot,
    DirectoryDepot,
    location_of,
    new_name,
    open_depot,
    private_location,
)
from stoker.errors import ConfigError

Opener = Callable[[str], Depot]

needs_obstore = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None, reason="obstore is not installed"
)


KINDS = [
    "directory",
    pytest.param("file", marks=needs_obstore),
    pytest.param("s3", marks=needs_obstore),
]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path: Path, far: Executor) -> Iterator[Opener]:
    """Opens the same place for a group of names."""
    depots: list[Depot] = []
    bucket: Bucket | None = request.getfixturevalue("bucket") if request.param == "s3" else None

    def open_(group: str) -> Depot:
        if request.param == "directory":
            depots.append(DirectoryDepot(tmp_path / "depot", group, keep_free=0))
        elif bucket is None:
            depots.append(FarDepot(far, f"file://{tmp_path}/depot", {}, group))
        else:
            depots.append(FarDepot(far, f"{bucket.url}/a/depot", bucket.options(), group))
        return depots[-1]

    yield open_
    for depot in depots:
        depot.close()


def test_what_was_put_comes_back(opened: Opener) -> None:
    depot = opened("a")
    names = [new_name("a") for _ in range(3)]
    for name in names:
        depot.publish(name, [b"head", memoryview(b"payload"), b""])
    assert depot.names() == sorted(names)
    assert bytes(depot.read(names[0])) == b"headpayload"
    assert bytes(depot.read(names[0], 4)) == b"head"
    assert bytes(depot.read(names[0], 400)) == b"headpayload"
    depot.remove([new_name("a"), names[0], new_name("a")])
    depot.remove([])
    assert depot.names() == sorted(names[1:])


def test_what_is_not_there(opened: Opener) -> None:
    with pytest.raises(FileNotFoundError):
        opened("a").read(new_name("a"))


def test_groups_do_not_see_each_other(opened: Opener) -> None:
    one, two = opened("a-0"), opened("a-1")
    mine, other = new_name("a-0"), new_name("a-1")
    one.publish(mine, [b"1"])
    two.publish(other, [b"2"])
    assert one.names() == [mine]
    assert two.names() == [other]


def test_a_package_is_replaced_whole(opened: Opener) -> None:
    depot = opened("a")
    name = new_name("a")
    depot.publish(name, [b"long, long"])
    depot.publish(name, [b"short"])
    assert bytes(depot.read(name)) == b"short"


def test_another_run_finds_them(opened: Opener) -> None:
    depot = opened("a")
    name = new_name("a")
    depot.publish(name, [b"1"])
    depot.close()
    assert opened("a").names() == [name]


@pytest.mark.parametrize("scheme", ["", pytest.param("file://", marks=needs_obstore)])
def test_a_place_with_other_things_is_refused(tmp_path: Path, scheme: str, far: Executor) -> None:
    (tmp_path / "precious.txt").write_text("data")
    with pytest.raises(ConfigError, match=r"precious\.txt"):
        FarDepot(far, f"{scheme}{tmp_path}", {}, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://host/packages", "cannot be written"),
        ("ftp://host/packages", "obstore"),
        pytest.param("s3://bucket", "whole bucket", marks=needs_obstore),
        pytest.param("s3://bucket/", "whole bucket", marks=needs_obstore),
    ],
)
def test_addresses_that_are_no_depots(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        location_of(url, {})


def test_a_directory_takes_no_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="storage_options"):
        location_of(str(tmp_path), {"region": "x"})


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold packages"):
        location_of(str(tmp_path / "file"), {})


def test_a_directory_is_one_jobs_at_a_time(tmp_path: Path) -> None:
    first = DirectoryDepot(tmp_path, "a", keep_free=0)
    with pytest.raises(BlockingIOError, match="another job"):
        DirectoryDepot(tmp_path, "a", patience=0.0)
    DirectoryDepot(tmp_path, "b", patience=0.0).close()
    threading.Timer(0.2, first.close).start()
    DirectoryDepot(tmp_path, "a", patience=20.0).close()


OPEN_AND_WAIT = """
import json, sys
from stoker.bundles.depot import location_of
from stoker.bundles.object_depot import ObjectDepot
url, options, holder = json.loads(sys.argv[1])
depot = ObjectDepot(location_of(url, options), "a", holder, renew=0.3, expiry=30.0)
depot.publish("a-" + holder + ".pkg", [b"x"])
print(depot.names(), flush=True)
sys.stdin.read()
depot.close()
"""
FOLLOW = OPEN_AND_WAIT.replace("expiry=30.0", "expiry=2.0")


@contextmanager
def opening(script: str, bucket: Bucket, holder: str) -> Iterator[subprocess.Popen[str]]:
    """A process that uses packages in the bucket until its input ends."""
    asked = json.dumps([f"{bucket.url}/depot", bucket.options(), holder])
    with subprocess.Popen(
        [sys.executable, "-c", script, asked],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@needs_obstore
def test_s11_an_object_store_is_one_jobs_at_a_time(bucket: Bucket) -> None:
    with opening(OPEN_AND_WAIT, bucket, "0a") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "['a-0a.pkg']\n"
        with opening(OPEN_AND_WAIT, bucket, "0b") as second:
            _, why = second.communicate(timeout=60)
            assert second.returncode == 1
            assert "BlockingIOError: [Errno 16] another job keeps its packages there" in why
        first.communicate(timeout=60)  # ends, and gives it back
        assert first.returncode == 0
    with opening(OPEN_AND_WAIT, bucket, "0b") as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "['a-0a.pkg', 'a-0b.pkg']\n"


@needs_obstore
def test_s11_a_killed_job_is_followed(bucket: Bucket) -> None:
    with opening(OPEN_AND_WAIT, bucket, "0a") as first:
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()
    with opening(FOLLOW, bucket, "0b") as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "['a-0a.pkg', 'a-0b.pkg']\n"


def test_a_full_disk_is_not_filled(tmp_path: Path) -> None:
    depot = DirectoryDepot(tmp_path, "a", keep_free=1 << 60)
    with pytest.raises(OSError, match="stay free") as refused:
        depot.publish(new_name("a"), [b"x"])
    assert refused.value.errno == errno.ENOSPC
    assert depot.names() == []
    depot.close()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    import resource

    depot = DirectoryDepot(tmp_path, "a", keep_free=0)
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from stoker.bundles.depot import DirectoryDepot\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"depot = DirectoryDepot(Path({str(tmp_path)!r}), 'b', keep_free=0)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))\n"
        "try: depot.publish('b-1.pkg', [b'x' * 5000])\n"
        "except OSError: sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 7
    assert list(tmp_path.glob("b*")) == []
    depot.close()


def test_a_directory_that_vanished_is_made_again(tmp_path: Path) -> None:
    place = tmp_path / "depot"
    depot = DirectoryDepot(place, "a", keep_free=0)
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    with pytest.raises(FileNotFoundError):
        depot.read(new_name("a"))
    name = new_name("a")
    depot.publish(name, [b"x"])
    assert depot.names() == [name]
    assert (place / MARKER).is_file()
    depot.close()


def test_half_written_files_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    DirectoryDepot(tmp_path, "a").close()
    (tmp_path / "a-123.pkg.new").write_bytes(b"half")
    (tmp_path / "b-123.pkg.new").write_bytes(b"another's")
    depot = DirectoryDepot(tmp_path, "a")
    assert depot.names() == []
    assert not (tmp_path / "a-123.pkg.new").exists()
    assert (tmp_path / "b-123.pkg.new").exists()
    depot.close()


def test_a_private_directory_goes_with_its_depot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    place = private_location("key")
    assert place.parent == tmp_path
    depot = open_depot(place, True, "a", "ab")
    assert place.stat().st_mode & 0o777 == 0o700
    depot.remove([])
    (place / "a-1.pkg").write_bytes(b"x")
    depot.close()
    assert not place.exists()


def test_private_directories_of_the_dead_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    living = open_depot(private_location("living"), True, "a", "ab")
    dead = private_location("dead")
    dead.mkdir()
    (dead / MARKER).touch()
    (dead / "a-1.pkg").touch()
    unmarked = private_location("unmarked")
    unmarked.mkdir()
    (unmarked / "a-1.pkg").touch()
    depot = open_depot(private_location("new"), True, "a", "ab")
    assert not dead.exists()
    assert unmarked.exists()
    assert private_location("living").exists()
    depot.close()
    living.close()

"""Every intercepted function, called by a C program: where the shim sends it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import until

from shim.conftest import Compile
from shim.hand import LIBRARY, HandDaemon
from shim.test_posix import CASES
from stoker.tiering.layout import Kind

OPENS = ["open", "open64", "openat", "openat64", "__open", "__open64", "__open_2", "__open64_2"]
OPENS += ["__openat_2", "__openat64_2", "fopen", "fopen64", "freopen", "freopen64"]
OPENS += ["close", "__close", "dup", "dup2", "__dup2", "dup3", "fcntl", "fcntl64"]
OPENS += ["chdir", "fchdir"]
STATS = ["fstat", "fstat64", "fstatat", "fstatat64", "statx"]
STATS += ["__fxstat", "__fxstat64", "__fxstatat", "__fxstatat64"]
AT_OFFSET = ["pread", "pread64", "__pread64", "__pread_chk", "__pread64_chk"]
AT_OFFSET += ["preadv", "preadv64", "preadv2"]
MAPS = ["mmap", "mmap64"]
ALONG = ["read", "__read", "__read_chk", "readv", "preadv64v2"]

CHANGED = b"one of the tier..\n"  # as long as what the source has


def symbols_of_library() -> set[str]:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True
    )
    return {line.split()[2] for line in listed.stdout.splitlines()}


def test_the_documented_functions_are_the_intercepted_ones() -> None:
    rows = re.findall(
        r"^\| (`.*?`) \|", LIBRARY.with_name("preload.md").read_text(), flags=re.MULTILINE
    )
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == symbols_of_library()


def test_each_intercepted_function_is_called_by_a_test() -> None:
    called = {word for lines in CASES.values() for line in lines for word in line.split()[1:2]}
    missing = symbols_of_library() - {*OPENS, *STATS, *AT_OFFSET, *MAPS, *ALONG} - called
    assert missing == set()


def test_runs_with_glibc_2_17() -> None:
    needed = subprocess.run(["objdump", "-T", LIBRARY], capture_output=True, text=True, check=True)
    versions = re.findall(r"\(?GLIBC_(\d+)\.(\d+)[.\d]*\)? (\w+)", needed.stdout)
    assert versions
    newer = [version for version in versions if (int(version[0]), int(version[1])) > (2, 17)]
    assert newer == []


@pytest.mark.parametrize("name", OPENS)
def test_opens_the_copy(name: str, source: Path, compiled: Compile) -> None:
    with HandDaemon(source) as daemon:
        daemon.place("one", CHANGED)
        command = [compiled("calls"), "open", name, source / "one"]
        assert daemon.run(command, cwd=Path(__file__).parent).stdout == CHANGED
        # Nothing is placed and nobody answers: the source.
        command[-1] = source / "sub" / "two"
        daemon.end()
        assert daemon.run(command).stdout == b"two of the source\n"


@pytest.mark.parametrize("name", STATS)
def test_status_of_a_copy_is_the_source_s(name: str, source: Path, compiled: Compile) -> None:
    (source / "one").chmod(0o640)
    os.link(source / "one", source / "link")
    # 1969: times before 1970 are negative.
    os.utime(source / "one", ns=(-1_500_000_000, -3_200_000_001))
    command = [compiled("calls"), "stat", name, source / "one"]
    plain = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    with HandDaemon(source) as daemon:
        daemon.place("one", CHANGED)
        assert daemon.run(command).stdout == plain
        assert daemon.counted()["tier_opens"] == 1
        # A descriptor that is no copy keeps its own.
        command[-1] = source / "sub" / "two"
        daemon.end()
        assert int(daemon.run(command).stdout.split()[1]) == command[-1].stat().st_ino


def read_while_copying(
    daemon: HandDaemon, program: Path, name: str, offset: int, length: int, copied: int
) -> tuple[bytes, int]:
    """What a program reads of `large` of which `copied` bytes, all of them b"c", are copied."""
    command = [program, "read", name, daemon.source / "large", str(offset), str(length)]
    number = daemon.begin("large")
    with subprocess.Popen(
        command, env=daemon.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == b"opened\n"
        daemon.advance(number, b"c" * copied)
        if copied == (daemon.source / "large").stat().st_size:
            daemon.finish(number, b"c" * copied)
        output, _ = reader.communicate(b"\n", timeout=60)
    assert reader.returncode == 0
    content, _, position = output.rpartition(b"\n")
    return content, int(position)


@pytest.mark.parametrize("name", AT_OFFSET + ALONG)
def test_reads_what_is_copied_from_the_copy(name: str, source: Path, compiled: Compile) -> None:
    size = (source / "large").stat().st_size
    for copied in (150_000, size):
        with HandDaemon(source) as daemon:
            content, position = read_while_copying(
                daemon, compiled("calls"), name, 100, 120_000, copied
            )
            assert content == b"c" * 120_000
            assert position == (120_100 if name in ALONG else 100)
            counts = daemon.counted()
            assert (counts["tier_bytes"], counts["source_bytes"]) == (120_000, 0)


@pytest.mark.parametrize("name", AT_OFFSET + ALONG)
def test_reads_what_is_not_copied_from_the_source(
    name: str, source: Path, compiled: Compile
) -> None:
    whole = (source / "large").read_bytes()
    with HandDaemon(source, ahead_bytes=0) as daemon:
        content, position = read_while_copying(
            daemon, compiled("calls"), name, 1000, 300_000, copied=900
        )
        assert content == whole[1000:]
        assert position == (len(whole) if name in ALONG else 1000)
        counts = daemon.counted()
        assert (counts["tier_bytes"], counts["source_bytes"]) == (0, len(whole) - 1000)


@pytest.mark.parametrize("name", MAPS)
def test_maps_the_copy_once_it_is_complete(name: str, source: Path, compiled: Compile) -> None:
    whole = (source / "large").read_bytes()
    for copied, expected in ((len(whole), b"c" * 9000), (200_000, whole[5000:14000])):
        with HandDaemon(source, ahead_bytes=0) as daemon:
            content, _ = read_while_copying(
                daemon, compiled("calls"), name, 5000, 9000, copied=copied
            )
            assert content == expected


def test_a_stream_waits_for_its_copy_where_opens_do(source: Path, compiled: Compile) -> None:
    for small, expected in ((1 << 20, b"c" * 251_000), (0, (source / "large").read_bytes())):
        with HandDaemon(source, small_bytes=small) as daemon:
            number = daemon.begin("large")
            command = [compiled("calls"), "open", "fopen", source / "large"]
            with subprocess.Popen(command, env=daemon.env, stdout=subprocess.PIPE) as reader:
                if small:
                    until(lambda daemon=daemon: daemon.counted()["waits"])
                    daemon.finish(number, b"c" * 251_000)
                assert reader.communicate(timeout=60)[0] == expected


@pytest.mark.parametrize("name", ["fcntl", "fcntl64"])
def test_t7_reads_by_a_descriptor_of_f_dupfd_are_seen(
    name: str, source: Path, compiled: Compile
) -> None:
    with HandDaemon(source) as daemon:
        daemon.place("one", CHANGED)
        assert daemon.run([compiled("calls"), "open", name, source / "one"]).stdout == CHANGED
        assert daemon.counted()["tier_bytes"] == len(CHANGED)


def test_a_file_that_opens_slowly_is_handed_to_the_daemon(source: Path, compiled: Compile) -> None:
    slow = compiled("slow", "-shared", "-fPIC", "-ldl")
    read = f"{sys.executable} -c 'import sys; open(sys.argv[1], \"rb\").read()' "
    for library, name, handed in (
        (slow, "one", 1),
        (slow, "large", 0),  # read past the page cache, by a descriptor of the daemon's own
        (None, "sub/two", 0),
    ):
        with HandDaemon(source, small_bytes=0) as daemon:
            env = dict(daemon.env)
            if library:
                env["LD_PRELOAD"] += f" {library}"
            daemon.run(["sh", "-c", read + str(source / name)], env=env)
            daemon.settle()
            assert daemon.requests == [(Kind.OPENED, name.encode())]
            assert daemon.handed == handed or (library is None and daemon.handed <= 1)
            assert daemon.counted()["waits"] == 0


def test_open_before_constructors(source: Path, compiled: Compile) -> None:
    with HandDaemon(source) as daemon:
        daemon.place("one", CHANGED)
        both = daemon.run([compiled("calls"), "early", source / "one"]).stdout
        assert both == b"one of the source\n" + CHANGED

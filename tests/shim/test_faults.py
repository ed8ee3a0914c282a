"""Whatever is wrong with daemon, table or copy: the program reads the source, or what it should."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shim.hand import LIBRARY, HandDaemon
from stoker.node.locks import try_lock
from stoker.tiering.layout import COUNTERS, HEADER, RING, RING_BYTES, Kind, State, offset_of

SOURCE = b"one of the source\n"
COPY = b"one of the tier..\n"  # as long as what the source has


def cat(daemon: HandDaemon, path: Path) -> bytes:
    return daemon.run(["cat", path]).stdout


def at(name: str) -> int:
    return offset_of(HEADER, name)


def overwrite(daemon: HandDaemon, offset: int, content: bytes) -> None:
    with (daemon.root / "table").open("r+b") as table:
        table.seek(offset)
        table.write(content)


def cut(daemon: HandDaemon, size: int) -> None:
    """Let the table be its first bytes only; the daemon's own mapping stays whole."""
    with (daemon.root / "table").open("rb") as table:
        begin = table.read(size)
    (daemon.root / "table").rename(daemon.root / "whole")
    (daemon.root / "table").write_bytes(begin)


DAMAGES: dict[str, Callable[[HandDaemon], object]] = {
    "no table": lambda daemon: (daemon.root / "table").unlink(),
    "table of another program": lambda daemon: overwrite(daemon, 0, b"SQLite format 3\0"),
    "table of another version": lambda daemon: overwrite(daemon, at("version"), b"\7"),
    "empty table": lambda daemon: cut(daemon, 0),
    "table cut short": lambda daemon: cut(daemon, 8192),
    "header alone": lambda daemon: cut(daemon, 4096),
    "table is a directory": lambda daemon: (
        (daemon.root / "table").unlink(),
        (daemon.root / "table").mkdir(),
    ),
    "table is a pipe": lambda daemon: (
        (daemon.root / "table").unlink(),
        os.mkfifo(daemon.root / "table"),
    ),
    "entries beyond the end": lambda daemon: overwrite(
        daemon, at("entries_offset"), struct.pack("=Q", 1 << 62)
    ),
    "more entries than bytes": lambda daemon: overwrite(
        daemon, at("entries_limit"), struct.pack("=Q", 1 << 60)
    ),
    "index beyond the end": lambda daemon: overwrite(
        daemon, at("path_index_offset"), struct.pack("=Q", (1 << 64) - 8)
    ),
    "index too large": lambda daemon: overwrite(daemon, at("path_index_log2"), b"\x1f\0\0\0"),
    "arena too large": lambda daemon: overwrite(
        daemon, at("arena_limit"), struct.pack("=Q", 1 << 61)
    ),
    "a hundred sources": lambda daemon: overwrite(daemon, at("source_count"), b"\x64"),
    "daemon ended": lambda daemon: daemon.end(),
    "daemon died": lambda daemon: (daemon.silence(2), daemon.die()),
    "daemon silent": lambda daemon: overwrite(daemon, at("heartbeat_ns"), struct.pack("=Q", 1)),
    "run's directory gone": lambda daemon: daemon.root.rename(daemon.root.with_suffix(".gone")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_falls_through_to_the_source(damage: str, source: Path) -> None:
    with HandDaemon(source, wait_ms=200) as daemon:
        daemon.place("one", COPY)
        assert cat(daemon, source / "one") == COPY
        daemon.pause()
        DAMAGES[damage](daemon)
        command = [sys.executable, "-c", "import sys; print(open(sys.argv[1]).read(), end='')"]
        assert daemon.run(["cat", source / "one"]).stdout == SOURCE
        assert daemon.run([*command, source / "one"]).stdout == SOURCE
        gone = daemon.root.with_suffix(".gone")
        if gone.exists():
            gone.rename(daemon.root)


def test_a_slow_daemon_is_not_gone(source: Path) -> None:
    with HandDaemon(source, wait_ms=200) as daemon:
        daemon.place("one", COPY)
        daemon.pause()
        daemon.silence(2)
        assert cat(daemon, source / "one") == COPY, "its lock says that it lives"
        daemon.silence(31)
        assert cat(daemon, source / "one") == SOURCE


def test_another_daemon_s_table_is_no_sign_of_life(source: Path) -> None:
    with HandDaemon(source, wait_ms=200) as daemon:
        daemon.place("one", COPY)
        daemon.pause()
        code = (
            "import os, sys, time\nopen(sys.argv[1]).read()\nprint('ready', flush=True)\n"
            "sys.stdin.readline()\nprint(open(sys.argv[1]).read(), end='')"
        )
        program = subprocess.Popen(
            [sys.executable, "-c", code, source / "one"],
            env=daemon.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert program.stdout and program.stdout.readline() == b"ready\n"
        table = daemon.root / "table"
        with table.open("rb") as file:
            content = file.read(1 << 16)
        table.rename(daemon.root / "old")
        table.write_bytes(content)
        with table.open("r+b") as other:
            assert try_lock(other.fileno())
            daemon.silence(2, "old")
            out, _ = program.communicate(b"go on\n", timeout=60)
        assert out == SOURCE


def test_a_copy_that_was_renamed_a_moment_ago(source: Path) -> None:
    """Between the rename and the word of it, what is copied is read from the copy all the same."""
    content = bytes(reversed((source / "large").read_bytes()))
    code = (
        "import os, sys\nfd = os.open(sys.argv[1], os.O_RDONLY)\nprint('ready', flush=True)\n"
        "sys.stdin.readline()\nsys.stdout.buffer.write(os.pread(fd, 1000, 500))"
    )
    with HandDaemon(source) as daemon:
        number = daemon.begin("large")
        daemon.advance(number, content)
        program = subprocess.Popen(
            [sys.executable, "-c", code, source / "large"],
            env=daemon.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert program.stdout and program.stdout.readline() == b"ready\n"
        (daemon.parts / str(number)).rename(daemon.copies / "large")
        out, _ = program.communicate(b"go on\n", timeout=60)
        assert out == content[500:1500]
        assert daemon.counted()["source_bytes"] == 0


def test_garbage_behind_a_good_header(source: Path) -> None:
    """Whatever the entries and indexes say, programs end well and read one of both files."""
    random = np.random.default_rng(7)
    with HandDaemon(source, wait_ms=20) as daemon:
        daemon.place("one", COPY)
        daemon.pause()
        for begin in (4096, at("path_index_log2"), at("changes")):
            for _ in range(4):
                size = 128 if begin == 4096 else 4
                overwrite(daemon, begin, random.bytes(size))
                assert cat(daemon, source / "one") in (SOURCE, COPY)
        overwrite(daemon, 4096, random.bytes(1 << 18))  # as much as is allocated
        assert cat(daemon, source / "one") in (SOURCE, COPY)


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda copy: copy.unlink(),
    "cut short": lambda copy: os.truncate(copy, 5),
    "replaced": lambda copy: (copy.unlink(), copy.write_bytes(b"another one, 18 b\n")),
    "appended to": lambda copy: copy.write_bytes(COPY + b"more"),
    "touched": lambda copy: os.utime(copy, ns=(5, 5)),
    "tier gone": lambda copy: shutil.rmtree(copy.parent),
    "a directory": lambda copy: (copy.unlink(), copy.mkdir()),
    "a link": lambda copy: (copy.unlink(), copy.symlink_to("/etc/hostname")),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_copy_that_is_not_what_it_was(loss: str, source: Path) -> None:
    with HandDaemon(source) as daemon:
        number = daemon.place("one", COPY)
        LOSSES[loss](daemon.copies / "one")
        assert cat(daemon, source / "one") == SOURCE
        assert daemon.counted()["source_opens"] == 1
        daemon.settle()
        assert loss == "a directory" or daemon.requests == [(Kind.CHANGED, b"one")]
        assert daemon.table.state(number) == State.PLACED  # nobody but the daemon writes the table


def test_a_file_written_by_a_program_is_looked_at_each_time(source: Path) -> None:
    code = "import sys; f = open(sys.argv[1], 'r+'); f.write('ONE'); f.close(); "
    code += "print(open(sys.argv[1]).read(), end='')"
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        assert cat(daemon, source / "one") == COPY
        out = daemon.run([sys.executable, "-c", code, source / "one"]).stdout
        assert out == b"ONE of the source\n"
        assert cat(daemon, source / "one") == b"ONE of the source\n"


WRITER = """
import sys
file = open(sys.argv[1], "r+")
print("open", flush=True)
if sys.stdin.readline() == "dup\\n":
    import os
    other = os.dup(file.fileno())
    file.close()
    print("closed", flush=True)
    sys.stdin.readline()
    os.close(other)
else:
    file.close()
print("all closed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["close", "dup", "kill"])
def test_t2_no_copy_is_used_while_a_program_may_write_the_file(end: str, source: Path) -> None:
    """One that was killed counts as one that may: nobody knows whom it handed the file."""
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, source / "one"],
            env=daemon.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as writer:  # fmt: skip
            assert writer.stdin and writer.stdout and writer.stdout.readline() == "open\n"
            assert cat(daemon, source / "one") == SOURCE
            for word, answer in {"dup": [("dup", "closed"), ("go on", "all closed")]}.get(
                end, [("close", "all closed")] if end == "close" else []
            ):
                writer.stdin.write(f"{word}\n")
                writer.stdin.flush()
                assert writer.stdout.readline() == f"{answer}\n"
                expected = COPY if answer == "all closed" else SOURCE
                assert cat(daemon, source / "one") == expected
            writer.kill()
        assert cat(daemon, source / "one") == (SOURCE if end == "kill" else COPY)


def test_t2_doubts_end_when_the_daemon_has_looked(source: Path) -> None:
    code = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"
    with HandDaemon(source, places=True) as daemon:
        daemon.place("one", COPY)
        assert cat(daemon, source / "one") == COPY
        assert daemon.counted()["checks"] == 0
        daemon.run([sys.executable, "-c", code, source / "one"])
        deadline, checks = time.monotonic() + 30, -1
        while checks != daemon.counted()["checks"] and time.monotonic() < deadline:
            daemon.settle()
            checks = daemon.counted()["checks"]
            assert cat(daemon, source / "one") == COPY, "it was not changed"
        assert 0 < checks == daemon.counted()["checks"]


def test_a_silent_daemon_delays_a_program_once(source: Path) -> None:
    """It takes requests and never answers: after a wait for nothing there is none for a while."""
    for number in range(50):
        (source / f"file{number}").write_bytes(b"x")
    with HandDaemon(source, wait_ms=300) as daemon:
        begin = time.monotonic()
        paths = [source / f"file{number}" for number in range(50)]
        assert daemon.run(["cat", *paths]).stdout == b"x" * 50
        counts = daemon.counted()
        assert 1 <= counts["waits_given_up"] < 25, time.monotonic() - begin
        assert counts["source_opens"] == 50


def test_a_stuck_copy_delays_reads_once(source: Path) -> None:
    with HandDaemon(source, wait_ms=300) as daemon:
        number = daemon.begin("large")
        daemon.advance(number, b"c" * 1000)
        out = daemon.run(["dd", f"if={source}/large", "bs=1000", "status=none"]).stdout
        assert out == b"c" * 1000 + (source / "large").read_bytes()[1000:]
        assert daemon.counted()["waits_given_up"] == 1


def test_a_refused_file_is_not_asked_for_again(source: Path) -> None:
    with HandDaemon(source) as daemon:
        daemon.refuse("one")
        for _ in range(3):
            assert cat(daemon, source / "one") == SOURCE
        counts = daemon.counted()
        assert (counts["requests"], counts["waits"], counts["source_opens"]) == (0, 0, 3)
        assert (counts["source_reads"] > 0, counts["source_bytes"]) == (True, 3 * len(SOURCE))


def test_full_queue_of_the_daemon(source: Path) -> None:
    with HandDaemon(source, small_bytes=0) as daemon:
        for number in range(400):
            (source / f"file{number}").write_bytes(b"x")
        paths = [source / f"file{number}" for number in range(400)]
        code = "import sys\nfor path in sys.argv[1:]: assert open(path).read() == 'x'"
        daemon.pause()
        with (daemon.root / "counters").open("r+b") as counters:
            counters.seek(COUNTERS.itemsize + offset_of(RING, "head"))
            counters.write(struct.pack("=Q", RING_BYTES - 100 * 32))  # of which a hundred find room
        daemon.run([sys.executable, "-c", code, *paths])
        counts = daemon.counted()
        assert counts["requests"] + counts["requests_lost"] == 400
        assert 100 <= counts["requests"] <= 110, "a few may have gone to the socket"
        assert counts["source_opens"] == 400


def test_a_run_s_directory_with_a_long_name(source: Path) -> None:
    """Too long for a socket's name: what is placed is used, requests wait in the ring."""
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        long = daemon.root / ("d" * 120)
        long.symlink_to(daemon.root)
        env = daemon.env | {"STOKER_TIERING": str(long)}
        paths = [source / "one", source / "sub" / "two"]
        assert daemon.run(["cat", *paths], env=env).stdout == COPY + b"two of the source\n"
        daemon.settle()
        assert daemon.requests == [(Kind.OPENED, b"sub/two")]


def test_limited_address_space(source: Path) -> None:
    """The table's mapping must not take what the program needs."""
    code = "import sys; bytearray(1 << 27); print(open(sys.argv[1]).read(), end='')"
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        for limit, expected in ((1 << 30, SOURCE), (resource.RLIM_INFINITY, COPY)):
            out = daemon.run(
                [sys.executable, "-S", "-c", code, source / "one"],
                preexec_fn=lambda limit=limit: resource.setrlimit(
                    resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY)
                ),
            ).stdout
            assert out == expected


def test_without_a_run_the_library_does_nothing(source: Path) -> None:
    env = os.environ | {"LD_PRELOAD": str(LIBRARY)}
    for value in (None, "", "relative", "/nowhere"):
        if value is not None:
            env["STOKER_TIERING"] = value
        done = subprocess.run(["cat", source / "one"], env=env, capture_output=True, timeout=60)
        assert (done.stdout, done.stderr) == (SOURCE, b"")


def test_static_program(source: Path, tmp_path: Path) -> None:
    code = tmp_path / "static.c"
    code.write_text(
        "#include <stdio.h>\nint main(int c, char** v) { int b; FILE* f = fopen(v[1], "
        '"r"); while ((b = getc(f)) != EOF) putchar(b); return c != 2; }\n'
    )
    program = tmp_path / "static"
    if subprocess.run(["cc", "-static", "-o", program, code], capture_output=True).returncode:
        pytest.skip("no static C library")
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        assert daemon.run([program, source / "one"]).stdout == SOURCE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a set-uid program for others")
def test_set_uid_program(source: Path) -> None:
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        program = daemon.root / "cat"
        shutil.copy(shutil.which("cat") or "/bin/cat", program)
        program.chmod(0o755 | stat.S_ISUID)
        for folder in (daemon.root, source, *source.parents):
            if folder.stat().st_uid == 0 and folder.stat().st_mode & 0o055 != 0o055:
                folder.chmod(folder.stat().st_mode | 0o055)
        assert daemon.run([program, source / "one"], user=65534, extra_groups=[]).stdout == SOURCE

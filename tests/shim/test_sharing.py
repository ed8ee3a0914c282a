"""Descriptors that are shared, duplicated, inherited, locked, or many."""

from __future__ import annotations

import fcntl
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shim.conftest import Compile
from shim.hand import HandDaemon

COPY = b"one of the tier..\n"  # as long as what the source has


def python(daemon: HandDaemon, code: str, *arguments: object) -> bytes:
    return daemon.run([sys.executable, "-c", code, *arguments]).stdout


@pytest.mark.parametrize("when", ["source", "copying", "placed"])
def test_each_block_comes_once_to_those_who_share_an_offset(
    when: str, tmp_path: Path, compiled: Compile
) -> None:
    """Three processes of three threads each, reading while the copy grows under them."""
    blocks = 3000
    folder = tmp_path / "source"
    folder.mkdir()
    content = np.repeat(np.arange(blocks, dtype=np.uint32), 250).tobytes()
    (folder / "blocks").write_bytes(content)
    with HandDaemon(folder, ahead_bytes=200_000) as daemon:
        number = daemon.begin("blocks")
        with subprocess.Popen(
            [compiled("reads"), "share", folder / "blocks", "2"],
            env=daemon.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            assert reader.stdin is not None and reader.stdout is not None
            assert reader.stdout.readline() == "opened\n"
            if when == "placed":
                daemon.finish(number)
            reader.stdin.write("\n")
            reader.stdin.flush()
            if when == "copying":
                for end in range(0, len(content), 123_457):
                    daemon.advance(number, content[:end])
                daemon.finish(number)
            elif when == "source":
                daemon.end()
            output = reader.communicate(timeout=120)[0].splitlines()
        assert reader.returncode == 0
        assert output[:-1] == [f"{block} 1" for block in range(blocks)]
        assert output[-1] == f"end {len(content)}"
        counts = daemon.counted()
        if when == "placed":
            assert counts["tier_bytes"] == len(content)
        assert counts["tier_bytes"] + counts["source_bytes"] <= len(content)


def test_parent_and_child_share_an_offset(source: Path) -> None:
    code = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "assert os.read(fd, 4) == b'one '\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(os.read(fd, 3) != b'of ')\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "os.set_inheritable(fd, True)\n"
        "script = f'dd bs=4 count=1 status=none <&{fd}'\n"
        "import subprocess\n"
        "assert subprocess.check_output(script, shell=True, pass_fds=[fd]) == b'the '\n"
        "assert os.read(os.dup(fd), 100) == b'tier..\\n'\n"
        "assert os.read(fd, 1) == b''\n"
        "assert os.lseek(fd, 0, os.SEEK_CUR) == 18\n"
    )
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        python(daemon, code, source / "one")


def test_identity_survives_dup_fork_exec_and_the_daemon(source: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "same = lambda fd: os.path.samestat(os.fstat(fd), os.stat(sys.argv[1]))\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "assert b'tier' in os.read(fd, 100)\n"
        "assert same(fd) and same(os.dup(fd)) and same(os.dup2(fd, 77))\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(not same(fd))\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "with open(sys.argv[1]) as f:\n"
        "    out = subprocess.check_output(['stat', '-L', '-c', '%i', '-'], stdin=f)\n"
        "assert int(out) == os.stat(sys.argv[1]).st_ino, out\n"
        "print('ready', flush=True); input()\n"
        "assert same(fd)\n"
    )
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        command = [sys.executable, "-c", code, source / "one"]
        with subprocess.Popen(
            command, env=daemon.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as program:
            assert program.stdin is not None and program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            daemon.end()
            program.communicate(b"\n", timeout=60)
        assert program.returncode == 0


def test_locks_exclude_those_under_the_shim(source: Path) -> None:
    code = (
        "import fcntl, os, subprocess, sys\n"
        "lock = fcntl.LOCK_EX | fcntl.LOCK_NB\n"
        "for path in sys.argv[1:]:\n"
        "    first, second = open(path), open(path)\n"
        "    fcntl.flock(first, lock)\n"
        "    try: fcntl.flock(second, lock)\n"
        "    except BlockingIOError: pass\n"
        "    else: raise SystemExit('locked twice')\n"
        "    other = 'import fcntl, sys; fcntl.flock(open(sys.argv[1]), 6)'\n"
        "    assert subprocess.run([sys.executable, '-c', other, path], stderr=-3).returncode\n"
        "    fcntl.flock(first, fcntl.LOCK_UN)\n"
        "    fcntl.flock(second, lock)\n"
        "    fcntl.lockf(open(path), fcntl.LOCK_SH)\n"
    )
    (source / "lock").touch()
    with HandDaemon(source, places=True) as daemon:
        daemon.place("one", COPY)
        python(daemon, code, source / "one", source / "lock", source / "sub" / "two")


def test_a_lock_file_is_the_source_s_for_everyone(source: Path) -> None:
    """With and without the shim, opened for reading (empty) and for writing."""
    (source / "lock").touch()
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], sys.argv[2]), 6)"
    with HandDaemon(source, places=True) as daemon, (source / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for mode in ("r", "a", "r+"):
            command = [sys.executable, "-c", code, str(source / "lock"), mode]
            done = subprocess.run(command, env=daemon.env, capture_output=True, timeout=60)
            assert b"BlockingIOError" in done.stderr


def test_vfork(source: Path, compiled: Compile) -> None:
    with HandDaemon(source, places=True) as daemon:
        out = daemon.run([compiled("reads"), "vfork", source / "one"]).stdout
        assert out == b"%d %d\n" % (ord("o"), ord("o"))
        assert daemon.counted()["tier_opens"] == 2


def test_signal_handlers_and_small_stacks(source: Path, compiled: Compile) -> None:
    with HandDaemon(source, places=True) as daemon:
        assert daemon.run([compiled("reads"), "signal", source / "one"]).stdout == b"handled\n"
        assert daemon.run([compiled("reads"), "stack", source / "one"]).stdout == b"111\n"
        assert daemon.run([compiled("reads"), "stack", "./one"], cwd=source).stdout == b"111\n"


def test_ten_thousand_descriptors(source: Path, compiled: Compile) -> None:
    number = 10_000
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < number + 100:
        pytest.skip(f"at most {hard} descriptors are allowed here")

    def raise_limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number + 100, hard))

    with HandDaemon(source) as daemon:
        daemon.place("one", b"\x01" * 18)
        for name, first in (("one", 1), ("large", 0)):
            if name == "large":
                daemon.place("large")
            command = [compiled("reads"), "many", source / name, number]
            out = daemon.run(command, preexec_fn=raise_limit).stdout
            assert int(out) == number * first
        assert daemon.counted()["tier_opens"] == 2 * number


def test_no_descriptor_left(source: Path) -> None:
    """With none free there is no copy, but the source; and nothing stays open."""
    code = (
        "import os, resource, sys\n"
        "before = os.listdir('/proc/self/fd')\n"
        "for path in sys.argv[1:] * 3: open(path).close()\n"
        "assert os.listdir('/proc/self/fd') == before\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(before), 100))\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "try: os.open(sys.argv[1], os.O_RDONLY)\n"
        "except OSError as error: assert error.errno == 24\n"
        "else: raise SystemExit('opened')\n"
    )
    with HandDaemon(source, places=True) as daemon:
        names = ["one", "sub/two", "sub/../one", "large"]
        python(daemon, code, *(f"{source}/{name}" for name in names))

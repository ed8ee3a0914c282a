"""The ways in which a program may name a file below a source."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shim.hand import HandDaemon

COPY = b"one of the tier..\n"  # as long as what the source has
SOURCE = b"one of the source\n"


def cat(daemon: HandDaemon, path: str | bytes | Path, cwd: Path | None = None) -> bytes:
    """Read a file by a small program of ours: cat would advise and splice beside reading."""
    code = (
        "import os, sys\n"
        "fd = os.open(os.fsencode(sys.argv[1]), os.O_RDONLY)\n"
        "sys.stdout.buffer.write(os.read(fd, 1 << 20))\n"
    )
    command = [sys.executable, "-S", "-c", code, os.fsdecode(path)]
    return daemon.run(command, cwd=cwd).stdout


@pytest.mark.parametrize(
    "path",
    [
        "one",
        "./one",
        ".//one",
        "./././one",
        "sub/../one",
        "../source/one",
        "sub/link",
        "up/source/one",
        "{source}/one",
        "{source}//one",
        "{source}/./one",
        "{source}/sub/../one",
        "{source}/../source/one",
        "{source}/up/source/one",
        "{alias}/one",
        "{alias}/sub/../one",
        "/proc/self/cwd/one",
    ],
)
def test_spellings(path: str, source: Path) -> None:
    (source / "sub" / "link").symlink_to("../one")
    (source / "up").symlink_to("..")
    alias = source.parent / "alias"
    alias.symlink_to(source)
    path = path.format(source=source, alias=alias)
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        for link in ("sub/link", "up/source/one"):  # a path through a link is a file of its own
            daemon.place(link, COPY)
        assert cat(daemon, path, cwd=source) == COPY


def test_t7_the_working_directory_s_other_name_needs_no_look_at_the_source(source: Path) -> None:
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        (source / "one").unlink()  # behind the program's back
        assert cat(daemon, "/proc/self/cwd/one", cwd=source) == COPY
        assert cat(daemon, "/proc/self/cwd//./one", cwd=source) == COPY


def test_parent_of_a_linked_directory_is_the_link_s(source: Path) -> None:
    elsewhere = source.parent / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "one").write_bytes(b"another one")
    (source / "jump").symlink_to(elsewhere / "deep")
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        assert cat(daemon, source / "jump" / ".." / "one") == b"another one"
        assert cat(daemon, "jump/../one", cwd=source) == b"another one"
        assert cat(daemon, "../one", cwd=source / "sub") == COPY


def test_a_source_named_by_a_link(source: Path) -> None:
    alias = source.parent / "alias"
    alias.symlink_to(source)
    with HandDaemon(alias) as daemon:
        daemon.place("one", COPY)
        assert cat(daemon, alias / "one") == COPY
        assert cat(daemon, source / "one") == COPY
        assert cat(daemon, "one", cwd=alias) == COPY


def test_neighbours_of_a_source_are_left_alone(source: Path) -> None:
    neighbour = source.parent / "source2"
    neighbour.mkdir()
    (neighbour / "one").write_bytes(b"not below the source")
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        assert cat(daemon, neighbour / "one") == b"not below the source"
        assert cat(daemon, f"{source}2/one") == b"not below the source"
        assert daemon.requests == []
        assert daemon.counted()["source_opens"] == 0


ODD_NAMES = [
    b"new\nline",
    b"\xff\xfe not UTF-8",
    b" ",
    b"...",
    b".hidden",
    b"a" * 255,
    b"..two/.one",
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=repr)
def test_odd_names(name: bytes, source: Path) -> None:
    path = source / os.fsdecode(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(SOURCE)
    with HandDaemon(source) as daemon:
        daemon.place(name, COPY)
        assert cat(daemon, path) == COPY
        assert cat(daemon, name, cwd=source) == COPY


def test_path_of_4000_bytes(source: Path) -> None:
    """Its copy's name is too long for the kernel, so that the source answers; others are placed."""
    folder = source
    while len(os.fsencode(folder)) < 3700:
        folder = folder / ("d" * 250)
    folder.mkdir(parents=True)
    long = folder / ("f" * (4000 - len(os.fsencode(folder)) - 1))
    assert len(os.fsencode(long)) == 4000
    long.write_bytes(SOURCE)
    with HandDaemon(source, places=True) as daemon:
        assert cat(daemon, long) == SOURCE
        assert cat(daemon, long.name, cwd=folder) == SOURCE
        too_long = os.fsdecode(bytes(long)) + "/" + "g" * 200
        with pytest.raises(AssertionError, match="File name too long"):
            cat(daemon, too_long)


ERRORS = {
    "missing": (errno.ENOENT, os.O_RDONLY),
    "one/": (errno.ENOTDIR, os.O_RDONLY),
    "one/.": (errno.ENOTDIR, os.O_RDONLY),
    "one/two": (errno.ENOTDIR, os.O_RDONLY),
    "one": (errno.EEXIST, os.O_RDONLY | os.O_CREAT | os.O_EXCL),
    "link": (errno.ELOOP, os.O_RDONLY | os.O_NOFOLLOW),
    "./one": (errno.ENOTDIR, os.O_RDONLY | os.O_DIRECTORY),
    "sub": (errno.EISDIR, os.O_WRONLY),
    "": (errno.ENOENT, os.O_RDONLY),
}


@pytest.mark.parametrize("path", ERRORS)
def test_errors_are_the_kernel_s(path: str, source: Path) -> None:
    (source / "link").symlink_to("one")
    expected, flags = ERRORS[path]
    code = "import os, sys\ntry: os.open(sys.argv[1], int(sys.argv[2]))\n"
    code += "except OSError as error: print(error.errno)"
    with HandDaemon(source, places=True) as daemon:
        daemon.place("one", COPY)
        daemon.place("link", COPY)
        for spelling in (path, f"{source}/{path}" if path else path):
            command = [sys.executable, "-S", "-c", code, spelling, flags]
            assert int(daemon.run(command, cwd=source).stdout) == expected


def test_other_than_reading_opens_the_source(source: Path) -> None:
    code = (
        "import os, sys, fcntl\n"
        "for flags in (os.O_RDWR, os.O_RDWR | os.O_APPEND, os.O_RDONLY | os.O_CREAT):\n"
        "    assert os.read(os.open(sys.argv[1], flags), 4) == b'one ', flags\n"
        "    assert 'copies' not in os.readlink(f'/proc/self/fd/{os.open(sys.argv[1], flags)}')\n"
        "path = os.open(sys.argv[1], os.O_PATH)\n"
        "assert os.readlink(f'/proc/self/fd/{path}') == sys.argv[1]\n"
        "os.close(os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC))\n"
    )
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        daemon.run([sys.executable, "-S", "-c", code, source / "one"])
        assert (source / "one").read_bytes() == b""
        assert (daemon.copies / "one").read_bytes() == COPY


def test_relative_to_a_directory_s_descriptor(source: Path) -> None:
    code = (
        "import os, sys\n"
        "root = os.open(sys.argv[1], os.O_RDONLY)\n"
        "sub = os.open('sub', os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)\n"
        "for path, at in [('one', root), ('../one', sub), ('sub/../one', root), ('/x', sub)]:\n"
        "    path = sys.argv[1] + '/one' if path == '/x' else path\n"
        "    sys.stdout.buffer.write(os.read(os.open(path, os.O_RDONLY, dir_fd=at), 100))\n"
        "os.chdir(sub)\n"
        "sys.stdout.buffer.write(os.read(os.open('../one', os.O_RDONLY), 100))\n"
        "os.fchdir(root)\n"
        "sys.stdout.buffer.write(os.read(os.open('one', os.O_RDONLY), 100))\n"
    )
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        assert daemon.run([sys.executable, "-S", "-c", code, source]).stdout == COPY * 6


def test_lowest_free_descriptor_and_close_on_exec(source: Path) -> None:
    """The number must be the one that the kernel would give, whichever way the copy is found."""
    code = (
        "import ctypes, os, sys, fcntl\n"
        "libc = ctypes.CDLL(None)\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "for path in sys.argv[1:]:\n"
        "    for flag in (0, os.O_CLOEXEC):\n"
        "        os.close(0)\n"
        "        fd = libc.open(path.encode(), os.O_RDONLY | flag)\n"
        "        assert fd == 0, fd\n"
        "        assert 'copies' in os.readlink('/proc/self/fd/0')\n"
        "        assert bool(fcntl.fcntl(fd, fcntl.F_GETFD)) == bool(flag)\n"
        "        assert len(os.listdir('/proc/self/fd')) == before\n"
    )
    with HandDaemon(source, places=True) as daemon:
        daemon.place("one")
        new = [source / "sub" / "two", f"{source}/sub/../one"]
        daemon.run([sys.executable, "-S", "-c", code, source / "one", *new])


def test_program_without_a_working_directory(source: Path) -> None:
    script = f'mkdir {source}/gone; cd {source}/gone; rmdir {source}/gone; cat one; cat "$0"'
    with HandDaemon(source) as daemon:
        daemon.place("one", COPY)
        done = subprocess.run(
            ["sh", "-c", script, source / "one"], env=daemon.env, capture_output=True, timeout=60
        )
        assert done.stdout == COPY
        assert b"No such file" in done.stderr

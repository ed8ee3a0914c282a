"""Calls that change files, and those that look at them, in the manner of pjdfstest.

Each case is a list of calls for ``posix.c``. It runs on a tree of files without the library, and
with it on a tree all of whose files have copies: results, errno and bytes must be the same. ``M``
stands for the process that changes files and ``O`` for the one that looks: one process, or parent
and child, by fork or by fork and exec. The daemon does nothing meanwhile: what a program changes is
seen by all because the program says so.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shim.conftest import Compile
from shim.hand import HandDaemon

PROCESSES = {
    "alone": ("A", "A"),
    "child-changes": ("B", "A"),
    "program-changes": ("C", "A"),
    "child-looks": ("A", "B"),
    "program-looks": ("A", "C"),
}
FILES = ("one", "two", "new", "hard", "sub/three", "sub/deep/four", "link", "dirlink/three")
LONG_AGO = 10**18


def make_tree(root: Path) -> Path:
    """Files of one length and one time, so that only their bytes tell them apart, and links."""
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "other").mkdir()
    (root / "none").mkdir()
    for name in ("one", "two", "new", "sub/three", "sub/deep/four", "other/three"):
        (root / name).write_bytes(b"contents of %-14s" % name.encode())
    (root / "empty").touch()
    os.link(root / "two", root / "hard")
    for name, target in (
        ("link", "one"),
        ("dirlink", "sub"),
        ("dangling", "nowhere"),
        ("loop", "loop"),
    ):
        (root / name).symlink_to(target)
    for path in root.rglob("*"):
        os.utime(path, ns=(LONG_AGO, LONG_AGO), follow_symlinks=False)
    return root


def looks(*names: str) -> list[str]:
    """What can be asked of files by their names."""
    calls = ("cat", "catat", "catmap", "catstream", "stat", "lstat", "access")
    return [f"O {call} {name}" for name in names for call in calls]


def case(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split(";")]


WARM = [f"{who} {call} {name}" for who in "OM" for name in FILES for call in ("cat", "catmap")]

# Calls, and the files whose names are looked at afterwards.
CHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "rename over": ("M rename new one", ("one", "new", "link")),
    "rename over, absolute": ("M rename /new /one", ("/one", "/new")),
    "rename over a hard link": ("M rename new hard", ("two", "hard")),
    "rename away": ("M rename one gone", ("one", "gone", "link")),
    "rename away and back": ("M rename one gone; M rename gone one", ("one",)),
    "rename round": ("M rename one x; M rename two one; M rename x two", ("one", "two", "hard")),
    "rename onto itself": ("M rename two hard", ("two", "hard")),
    "rename through a link": ("M rename new dirlink/three", ("sub/three", "dirlink/three")),
    "rename by ..": ("M rename sub/../new sub/../one", ("one", "new")),
    "rename a link": ("M rename link two", ("two", "link", "hard")),
    "rename over a link": ("M rename new link", ("link", "one")),
    "renameat": ("M renameat new one", ("one", "new")),
    "renameat2": ("M renameat2 new one none", ("one", "new")),
    "renameat2 noreplace": (
        "M renameat2 new one noreplace; M renameat2 new fresh noreplace",
        ("one", "new", "fresh"),
    ),
    "renameat2 exchange": ("M renameat2 one two exchange", ("one", "two", "hard", "link")),
    "exchange directories": (
        "M renameat2 sub other exchange",
        ("sub/three", "other/three", "other/deep/four", "dirlink/three"),
    ),
    "rename a directory": ("M rename sub moved", ("sub/three", "moved/three", "dirlink/three")),
    "rename a directory over": ("M rename sub none", ("sub/three", "none/deep/four")),
    "directories swapped": (
        "M rename sub x; M rename other sub",
        ("sub/three", "x/three", "sub/deep/four", "dirlink/three"),
    ),
    "directory with a slash": ("M rename sub/ moved/", ("sub/three", "moved/three")),
    "link to a directory switched": (
        "M symlink other fresh; M rename fresh dirlink",
        ("dirlink/three", "sub/three"),
    ),
    "link to a file switched": ("M symlink two fresh; M rename fresh link", ("link", "one")),
    "link made by symlinkat": ("M unlink link; M symlinkat two link", ("link",)),
    "link made anew": ("M unlink link; M symlink two link", ("link",)),
    "unlink": ("M unlink one", ("one", "link")),
    "unlink, a link left": ("M unlink two", ("two", "hard")),
    "unlinkat": ("M unlinkat /sub/three none", ("sub/three", "dirlink/three")),
    "remove": ("M remove sub/three", ("sub/three",)),
    "remove everything": (
        "M unlink sub/three; M unlink sub/deep/four; M rmdir sub/deep; M unlinkat sub removedir",
        ("sub/three", "sub/deep/four", "sub"),
    ),
    "unlink and make": ("M unlink one; M put one another", ("one",)),
    "unlink and link": ("M unlink one; M link new one", ("one", "new")),
    "unlink and linkat": ("M unlink one; M linkat new one none", ("one", "new")),
    "unlink and mknod": ("M unlink one; M mknod one", ("one",)),
    "unlink and __xmknod": ("M unlink one; M __xmknod one", ("one",)),
    "unlink and __xmknodat": ("M unlink one; M __xmknodat one", ("one",)),
    "unlink and mknodat": ("M unlink one; M mknodat one", ("one",)),
    "unlink and mkdir": ("M unlink one; M mkdir one; M put one/x inside", ("one/x",)),
    "truncate": ("M truncate one 3", ("one", "link")),
    "truncate64": ("M truncate64 hard 3", ("two", "hard")),
    "truncate to longer": ("M truncate one 40", ("one",)),
    "truncate to nothing and back": ("M truncate one 0; M add one regrown", ("one",)),
    "ftruncate": ("M open 1 one w; M ftruncate 1 5", ("one",)),
    "ftruncate and close": ("M open 1 one rw; M ftruncate 1 5; M close 1", ("one",)),
    "creat": ("M creat 1 one; M write 1 fresh", ("one",)),
    "creat64": ("M creat64 1 one; M close 1", ("one",)),
    "trunc": ("M open 1 one w,trunc", ("one",)),
    "trunc for reading": ("M open 1 one r,trunc", ("one",)),
    "write in place": ("M open 1 one w; M pwrite 1 XY 2; M close 1", ("one", "link")),
    "write in place, open": ("M open 1 one rw; M pwrite 1 XY 2", ("one", "link")),
    "write by another name": ("M open 1 hard w; M pwrite 1 XY 2", ("two", "hard")),
    "write through a link": ("M open 1 link w; M pwrite 1 XY 2", ("one", "link")),
    "write, fdupfd and close": (
        "M open 1 one w; M fdupfd 1 2; M close 1; M pwrite 2 XY 2; M close 2; M cat two",
        ("one",),
    ),
    **{
        f"written by {call}": (
            f"M open 1 one w,cloexec; M {call} 1; M close 1; O cat one; M tell fresh", ("one",)
        )
        for call in ("posix_spawn", "posix_spawnp")
    },
    "append": ("M open 1 one w,append; M write 1 more", ("one",)),
    "add": ("M add one more; M add one still", ("one",)),
    "openat": ("M openat 1 one w,creat,trunc; M write 1 fresh; M close 1", ("one",)),
    "fopen w": ("M fopen 1 one w; M fwrite 1 fresh; M fclose 1", ("one",)),
    "fopen64 a": ("M fopen64 1 one a; M fwrite 1 more; M fflush 1", ("one",)),
    "fopen r+": ("M fopen 1 one r+; M fwrite 1 fresh; M fclose 1", ("one",)),
    "freopen": (
        "M fopen 1 two r; M freopen 1 one w; M fwrite 1 fresh; M fclose 1",
        ("one", "two"),
    ),
    "freopen a writer": (
        "M fopen 1 one w; M fwrite 1 fresh; M freopen 1 two r+; M fwrite 1 also; M fclose 1",
        ("one", "two"),
    ),
    "shared mapping": (
        "M open 1 one rw; M map 1 rw; M close 1; M poke 1 AB; O cat one; M poke 1 CD",
        ("one",),
    ),
    "chmod": ("M chmod one 600", ("one",)),
    "chmod to nothing": ("M nobody; O nobody; M chmod one 0", ("one",)),
    "fchmod": ("M open 1 one r; M fchmod 1 600", ("one",)),
    "fchmodat": ("M fchmodat one 600", ("one",)),
    "chown": ("M chown one 65534", ("one",)),
    "lchown": ("M lchown one 65534", ("one",)),
    "fchown": ("M open 1 one r; M fchown 1 65534", ("one",)),
    "fchownat": ("M fchownat one 65534", ("one",)),
    "utime": ("M utime one", ("one",)),
    "utimes": ("M utimes one", ("one",)),
    "futimesat": ("M futimesat one", ("one",)),
    "utimensat": ("M utimensat one", ("one",)),
    "futimens": ("M open 1 one r; M futimens 1", ("one",)),
    "futimes": ("M open 1 one r; M futimes 1", ("one",)),
    "mkfifoat": ("M mkfifo x; M mkfifoat y", ()),
    "set aside": ("M rename one one.old; M put one newer", ("one", "one.old")),
    "as an editor saves": (
        "M put .one.swp edited; M chmod .one.swp 644; M rename .one.swp one",
        ("one", ".one.swp"),
    ),
    **{
        call: (f"M {call} /t; M write 0 fresh; M close 0; M rename TEMPORARY one", ("one",))
        for call in (f"mk{flags}stemp{suffixed}{wide}" for flags in ("", "o")
                     for suffixed in ("", "s") for wide in ("", "64"))
    },
}  # fmt: skip

# Descriptors that are there when something changes: they follow what is written to their file, and
# keep the file that they have when the name becomes another's.
DESCRIPTORS: dict[str, str] = {
    "read behind a rename": (
        "O open 1 one r; M rename new one; O read 1 99; O lseek 1 0 set; O read 1 9"
    ),
    "read behind an unlink": "O open 1 one r; M unlink one; O read 1 99; O pread 1 4 3",
    "read behind truncate": "O open 1 one r; O read 1 9; M truncate one 12; O read 1 9; O read 1 9",
    "lseek behind truncate": "O open 1 one r; M truncate one 12; O lseek 1 -2 end; O read 1 9",
    "lseek64 behind append": "O open 1 one r; O lseek64 1 0 end; M add one more; O read 1 9",
    "fstat behind truncate": "O open 1 one r; M truncate one 12; O fstat 1; O same 1 one",
    "fstat behind chmod": "O open 1 one r; M chmod one 600; O fstat 1; O same 1 one",
    "fstat behind utimensat": "O open 1 one r; M utimensat one; O same 1 one",
    "fstat behind link": "O open 1 one r; M link one x; O fstat 1; O same 1 x",
    "writer first": (
        "M open 1 one w; O open 1 one r; M write 1 XYZ; O read 1 6; M write 1 U; O pread 1 9 0"
    ),
    "writer first, streams": (
        "M open 1 one w; O fopen 1 sub/../one r; O fopen 2 one r; M write 1 XYZ; O fread 1 6; "
        "O fread 2 6"
    ),
    "reader first": (
        "O open 1 one r; M open 1 one w; M write 1 XYZ; O read 1 6; M write 1 U; O pread 1 9 0"
    ),
    "readv": "O open 1 one r; M put one written; O readv 1 5; O readv 1 5",
    "preadv": "O open 1 one r; M put one written; O preadv 1 5 1; O preadv2 1 5 1",
    "map behind a write": "O open 1 one r; M put one written; O map 1 r; O peek 1 7",
    "dup": "O open 1 one r; O dup 1 2; M put one written; O read 2 5; O dup2 1 3; O pread 3 5 0",
    "fdupfd": "O open 1 one r; O fdupfd 1 2; O close 1; M put one written; O read 2 5; O getfl 2",
    "a child's offset": "A open 1 one r; B read 1 5; A read 1 5; B lseek 1 0 cur; A lseek 1 0 cur",
    "inherited": "A open 1 one r; B cat two; A put one written; B read 1 5; B same 1 one",
    "both ways": (
        "M open 1 one rw; M read 1 5; O put one written; M read 1 9; M write 1 Z; O cat one"
    ),
    "fchmod of a copy": "O open 1 one r; O fchmod 1 640; O fstat 1; M stat one; M same 1 one",
    "linked by its descriptor": "O open 1 one r; O linkat FD1 x follow; M cat x; M stat one",
    "written by its descriptor": (
        "O open 1 one r; O open 2 FD1 w; O write 2 fresh; O close 2; O read 1 9; O truncate FD1 7"
    ),
    "stream reopened": "O fopen 1 one r; O freopen 1 NULL r+; O fwrite 1 fresh; O fclose 1",
    "closed": (
        "O open 1 one r; O close 1; O read 1 4; O fstat 1; O lseek 1 0 set; O close 1; O dup 1 2"
    ),
}

ERRORS: dict[str, str] = {
    "ENOENT": (
        "M cat none/x; M rename x one; M unlink x; M truncate x 1; M link x y; M chmod x 600; "
        "M utimensat x; M open 1 x w; M fopen 1 x r+; M remove x; M unlinkat x none; M cat "
        "EMPTY; M rename EMPTY one; M rename one EMPTY; M unlink EMPTY; M truncate EMPTY 1; M "
        "cat dangling; M creat 1 none/x/y; M mknod none/x/y; M symlink one none/x/y; M "
        "mkstemp none/x/y; M stat x"
    ),
    "ENOTDIR": (
        "M cat one/x; M rename one/x two; M rename new one/x; M unlink one/x; M truncate "
        "one/x 1; M open 1 one/x w,creat; M open 1 one r,directory; M cat one/; M rename sub "
        "one; M rmdir one; M unlinkat one removedir; M chmod one/x 600; M link one/x y; M "
        "rename one one/; M unlink one/"
    ),
    "EEXIST": (
        "M link new one; M symlink new one; M mknod one; M mkfifo one; M open 1 one "
        "w,creat,excl; M mkdir one; M renameat2 new one noreplace; M linkat new one none; M "
        "open 1 link r,creat,excl"
    ),
    "EISDIR": (
        "M cat sub; M open 1 sub w; M rename one none; M unlink sub; M truncate sub 1; M "
        "creat 1 sub; M fopen 1 sub w; M open 1 sub rw; M fopen 1 sub r; M fread 1 4; M "
        "catstream sub"
    ),
    "ENOTEMPTY": "M rename none sub; M rmdir sub; M remove sub; M rename other sub",
    "EINVAL": (
        "M rename sub sub/deep/x; M truncate one -1; M open 1 one r; M ftruncate 1 3; M lseek "
        "1 0 bad; M lseek 1 -5 set; M pread 1 4 -1; M preadv 1 4 -1; M renameat2 one two "
        "noreplace,exchange; M readv 1 -1; M read 1 4"
    ),
    "ELOOP": (
        "M cat loop; M open 1 link r,nofollow; M open 1 loop w; M truncate loop 1; M rename "
        "loop/x y; M chmod loop 600; M unlink loop/x; M fopen 1 loop w; M cat loop/x; M "
        "utimensat loop"
    ),
    "ENAMETOOLONG": (
        "M cat LONG; M rename one LONG; M unlink LONG; M truncate LONG 1; M creat 1 LONG; M "
        "link one LONG; M symlink one LONG; M fopen 1 LONG w; M mkstemp LONG"
    ),
    "EBADF": (
        "M open 1 one r; M write 1 x; M close 1; M read 1 4; M pread 1 4 0; M readv 1 4; M "
        "preadv 1 4 0; M fstat 1; M lseek 1 0 set; M ftruncate 1 1; M fchmod 1 600; M "
        "futimens 1; M dup 1 2; M close 1; M open 1 one w; M read 1 4; M pread 1 4 0; M "
        "fdupfd 9 3"
    ),
    "EFAULT": (
        "M open 1 NULL r; M open 1 NULL w,creat; M rename NULL one; M rename one NULL; M "
        "unlink NULL; M truncate NULL 1; M link NULL x; M symlink one NULL; M chmod NULL 600; "
        "M open 1 one r; M readnowhere 1; M read 1 4; M creat 1 NULL; M unlinkat NULL none; M "
        "mknod NULL"
    ),
    "EACCES": (
        "M chmod one 0; M chmod sub 0; M nobody; O nobody; M cat one; O cat one; O catat one; "
        "O catstream one; M open 1 one w; M rename new one; M unlink one; M truncate two 1; M "
        "creat 1 fresh; M chmod two 600; O cat sub/three; O stat sub/three; O cat two; M put "
        "two x; M utimensat two; M link two x; M fopen 1 two w; M remove one; M chown two 0; "
        "O access one"
    ),
    "EXDEV": "M rename one /../../../../../../../proc/x; M link one /../../../../../../../proc/x",
    "a failed call changes nothing": (
        "M rename one sub/deep; M rename one none/x/y; M unlink none; M link one two; O cat "
        "one; O cat two"
    ),
}

LISTS: dict[str, str] = {
    "directories": (
        "O ls EMPTY; O ls .; O ls sub; M rename sub moved; O ls moved; O ls sub; M unlink "
        "moved/three; O ls moved; M put fresh x; O ls .; M mkdir more; O ls .; M rmdir more; "
        "O ls ."
    ),
}

CASES: dict[str, list[str]] = {
    **{
        name: WARM + case(calls) + looks(*names) + ["O ls ."]
        for name, (calls, names) in CHANGES.items()
    },
    **{
        name: WARM + case(calls) + looks("one", "two")
        for group in (DESCRIPTORS, ERRORS, LISTS)
        for name, calls in group.items()
    },
}


def run(program: Path, lines: list[str], root: Path, **options: object) -> list[str]:
    done = subprocess.run(
        [program], cwd=root, input="\n".join(lines) + "\n", text=True, capture_output=True,
        timeout=120, **options,
    )  # fmt: skip
    assert done.returncode == 0 and "UNKNOWN" not in done.stdout, done
    return done.stdout.splitlines()


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[HandDaemon]:
    source = make_tree(tmp_path / "with")
    with HandDaemon(source, small_bytes=0) as daemon:  # no open waits for a copy
        for name in FILES:
            daemon.place(name)
        yield daemon


# A case that names its processes has a child that inherits what is open then.
RUNS = [
    (name, processes)
    for name, lines in CASES.items()
    for processes in PROCESSES
    if processes == "alone" or not any(line[0] in "ABC" for line in lines)
]


@pytest.mark.parametrize(("name", "processes"), RUNS, ids=map(" - ".join, RUNS))
def test_t2_calls_have_the_same_results_as_without(
    name: str, processes: str, placed: HandDaemon, tmp_path: Path, compiled: Compile
) -> None:
    changer, looker = PROCESSES[processes]
    lines = [
        f"{ {'M': changer, 'O': looker}.get(line[0], line[0]) }{line[1:]}" for line in CASES[name]
    ]
    without = make_tree(tmp_path / "without")
    expected = run(compiled("posix"), lines, without)
    assert run(compiled("posix"), lines, placed.source, env=placed.env) == expected
    assert placed.counted()["tier_opens"] >= len(WARM) // 2, "copies were served at first"

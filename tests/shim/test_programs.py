"""Everyday programs over a whole tree: the same with and without the shim, cold and placed."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shim.hand import SMALL, HandDaemon

MTIME = 10**18 + 12_345_678


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files small and large, empty, sparse, linked twice, unreadable, with links and odd names."""
    random.seed(5)
    root = tmp_path / "tree"
    (root / "deep" / "er").mkdir(parents=True)
    for number, size in enumerate([1, 4095, 4096, 4097, SMALL, SMALL + 1, 5 * SMALL]):
        (root / "deep" / f"file {number}").write_bytes(random.randbytes(size))
    (root / "empty").touch()
    (root / "text").write_text("a needle\nand hay\n" * 40)
    (root / os.fsdecode(b"new\nline \xff")).write_text("odd needle\n")
    os.link(root / "text", root / "deep" / "hard")
    (root / "deep" / "soft").symlink_to("../text")
    (root / "dangling").symlink_to("nowhere")
    (root / "deep" / "er" / "x.sh").write_text("#!/bin/sh\necho needle\n")
    (root / "deep" / "er" / "x.sh").chmod(0o750)
    with (root / "sparse").open("wb") as file:
        file.truncate(3 * SMALL)
        file.write(b"begin")
    for path in root.rglob("*"):
        os.utime(path, ns=(MTIME, MTIME), follow_symlinks=False)
    return root


def shape(root: Path) -> list[tuple[object, ...]]:
    """What a copy of a tree must have in common with it."""
    found: list[tuple[object, ...]] = []
    for path in sorted(root.rglob("*"), key=os.fsencode):
        status = path.lstat()
        content = (
            path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        kept = status.st_mtime_ns == MTIME  # else it is the time of the test
        found.append((path.relative_to(root), status.st_mode, status.st_nlink, kept, content))
    return found


COMMANDS = {
    "cat": "find {tree} -type f -print0 | sort -z | xargs -0 cat",
    "cat <": 'cat < {tree}/text; cat < "{tree}/deep/file 5"',
    "cp": "cp -r {tree} {out}/a && cp -a {tree} {out}/b && cp --sparse=always -r {tree} {out}/c",
    "install": "install -p -m 640 {tree}/text {tree}/deep/file* {out}",
    "tar": "tar -C {tree} -cf - . | tar -C {out} -xf -; tar -C {tree} -cf {out}/t.tar . 2>&1",
    "tar --compare": "tar -C {tree} -cf {out}/t.tar . && tar -C {tree} --compare -f {out}/t.tar",
    "dd": 'dd if="{tree}/deep/file 6" of={out}/dd bs=1000 skip=3 count=100 2>/dev/null; '
    "dd if={tree}/text bs=7 iflag=fullblock status=none",
    "grep": "grep -rn needle {tree} | sort; cd {tree} && grep -rlc needle . | sort",
    "find": "find {tree} -type f -exec head -c 100 {{}} + | cat -v; "
    "find {tree} -printf '%p %s %i %T@\\n' | sort",
    "sha256sum": "cd {tree} && find . -type f -print0 | sort -z | xargs -0 sha256sum",
    "rsync": "rsync -aH {tree}/ {out}/r && rsync -aHc --itemize-changes {tree}/ {out}/r",
    "split": 'split -b 50000 "{tree}/deep/file 6" {out}/part; cat {out}/part*',
    "tail": "tail -c 100 {tree}/text; tac {tree}/text; wc {tree}/deep/file*",
    "cmp": "cp -r {tree} {out}/a && diff -r {tree} {out}/a && cmp {tree}/text {out}/a/text",
    "gzip": "gzip -nc {tree}/text | zcat; gzip -kc {tree}/sparse | wc -c",
    "script": "{tree}/deep/er/x.sh; sh {tree}/deep/er/x.sh",
}


def outcome(command: str, tree: Path, out: Path, env: dict[str, str]) -> object:
    if out.exists():
        shutil.rmtree(out)
    out.mkdir()
    done = subprocess.run(
        ["bash", "-c", "umask 022; " + command.format(tree=tree, out=out)],
        env=env | {"LC_ALL": "C"},
        capture_output=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr, shape(out)


@pytest.mark.parametrize("name", COMMANDS)
def test_same_with_and_without(name: str, tree: Path, tmp_path: Path) -> None:
    if shutil.which(name.split()[0]) is None and name != "script":
        pytest.skip(f"{name} is not installed")
    expected = outcome(COMMANDS[name], tree, tmp_path / "out", dict(os.environ))
    with HandDaemon(tree, places=True) as daemon:
        for _ in ("cold", "placed"):
            assert outcome(COMMANDS[name], tree, tmp_path / "out", daemon.env) == expected
        counts = daemon.counted()
        assert counts["tier_opens"] >= counts["source_opens"]
        assert counts["waits_given_up"] == 0


def fingerprint(daemon: HandDaemon) -> list[tuple[str, int]]:
    """The tree as it is, to see that nothing was changed below it."""
    return sorted((str(path), path.lstat().st_ctime_ns) for path in daemon.source.rglob("*"))


def test_the_source_is_never_written(tree: Path, tmp_path: Path) -> None:
    with HandDaemon(tree, places=True) as daemon:
        before = fingerprint(daemon)
        for name in ("cat", "cp", "tar", "grep"):
            outcome(COMMANDS[name], tree, tmp_path / "out", daemon.env)
        assert fingerprint(daemon) == before


def test_programs_that_write_below_a_source(source: Path) -> None:
    """sed -i, >>, cp over: what was written is read at once, by any program of the run."""
    steps: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("echo more >> {one}", lambda old: old + b"more\n"),
        ("sed -i s/one/uno/ {one}", lambda old: old.replace(b"one", b"uno")),
        ("cp {two} {one}", lambda old: (source / "sub" / "two").read_bytes()),
        ("printf XX | dd of={one} conv=notrunc status=none", lambda old: b"XX" + old[2:]),
    ]
    paths = {"one": source / "one", "two": source / "sub" / "two"}
    with HandDaemon(source, places=True) as daemon:
        for command, change in steps:
            old = daemon.run(["cat", source / "one"]).stdout
            daemon.run(["sh", "-c", command.format(**paths)])
            if command.startswith("sed"):  # renames a new file into its place: seen when due
                daemon.run(["sh", "-c", "exec 3>> {one}".format(**paths)])
            assert daemon.run(["cat", source / "one"]).stdout == change(old)

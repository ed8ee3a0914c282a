"""Readers while the daemon copies, drops and replaces under them: every byte is compared."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shim.hand import SMALL, HandDaemon
from stoker.tiering.layout import State

FILES = 60

READER = """
import hashlib, mmap, os, random, sys, threading, time

folder, until = sys.argv[1], time.monotonic() + float(sys.argv[2])
names = sorted(os.listdir(folder))
sizes = [os.stat(os.path.join(folder, name)).st_size for name in names]
expected = [hashlib.shake_128(n.encode()).digest(s) for n, s in zip(names, sizes)]
kept = [os.open(os.path.join(folder, name), os.O_RDONLY) for name in names]

def whole(path, fd, content):
    with open(path, "rb", buffering=0) as file:
        assert file.readall() == content

def blocks(path, fd, content):
    with open(path, "rb", buffering=random.choice([100, 4096, 70000])) as file:
        size = random.choice([77, 5000, 66000])
        parts = iter(lambda: file.read(size), b"")
        assert b"".join(parts) == content

def kept_descriptor(path, fd, content):
    begin = random.randrange(len(content))
    size = random.randrange(100_000)
    assert os.pread(fd, size, begin) == content[begin : begin + size]

def mapped(path, fd, content):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[:] == content

def identity(path, fd, content):
    with open(path, "rb") as file:
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(path))

def work(seed):
    global rounds
    try:
        ways = [whole, blocks, kept_descriptor, mapped, identity]
        while time.monotonic() < until and not failures:
            i = random.randrange(len(names))
            random.choice(ways)(os.path.join(folder, names[i]), kept[i], expected[i])
            rounds += 1
    except BaseException as error:
        failures.append(repr(error)[:500])

rounds, failures = 0, []
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(rounds)
sys.exit("; ".join(failures) or None)
"""


def content_of(name: str, size: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(size)


def disturb(daemon: HandDaemon, names: list[str]) -> None:
    """One step of a busy daemon's life, on a random file."""
    name = random.choice(names)
    number = daemon.table.find(name.encode())
    state = None if number is None else daemon.table.state(number)
    if number is None or state in (State.DROPPED, State.REFUSED):
        daemon.begin(name)
    elif state is State.COPYING:
        content = (daemon.source / name).read_bytes()
        done = daemon.table.entry(number)["copied"]
        if done < len(content):
            daemon.advance(number, content[: done + random.randrange(1, len(content) + 1)])
        else:
            daemon.finish(number)
    elif random.random() < 0.5:
        daemon.drop(number)


@pytest.mark.parametrize("small", [SMALL, 0])
def test_every_byte_is_right(tmp_path: Path, soak: float, small: int) -> None:
    random.seed(11)
    folder = tmp_path / "source"
    folder.mkdir()
    names = [f"file {number}" for number in range(FILES)]
    for name in names:
        size = int(random.choice([10, 1000, SMALL, 2 * SMALL, 5 * SMALL]) * random.uniform(1, 1.5))
        (folder / name).write_bytes(content_of(name, size))
    seconds = max(soak, 4.0)
    with HandDaemon(folder, wait_ms=20, ahead_bytes=SMALL, small_bytes=small) as daemon:
        command = [sys.executable, "-c", READER, str(folder), str(seconds)]
        with subprocess.Popen(
            command, env=daemon.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as reader:
            while reader.poll() is None:
                disturb(daemon, names)
                time.sleep(0.0005)
            output, errors = reader.communicate(timeout=60)
        assert reader.returncode == 0, errors
        counts = daemon.counted()
        assert int(output) > 100
        assert counts["tier_opens"] > 0 and counts["tier_reads"] > 0
        assert counts["source_opens"] > 0


CHANGER = """
import mmap, os, sys, time
from pathlib import Path

folder, versions = Path(sys.argv[1]), int(sys.argv[2])
done = mmap.mmap(-1, 8)  # versions that every process must see from now on

def write(path, version):
    path.write_bytes(b"%08d" % version)
    os.utime(path, (10**9, 10**9))  # nothing but the file itself tells one from another
    return path

def change(version):
    write(folder / "fresh", version).replace(folder / "file")
    below = folder / f"below{version}"
    below.mkdir()
    write(below / "file", version)
    (folder / "fresh").symlink_to(below.name)
    (folder / "fresh").replace(folder / "current")
    done[:] = b"%08d" % version

def read():
    for path in (folder / "file", folder / "current" / "file"):
        least = int(done[:])
        found = int(path.read_bytes())
        assert found >= least, (path, found, least)

change(0)
children = []
for _ in range(2):
    if (child := os.fork()) == 0:
        try:
            while int(done[:]) < versions:
                read()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
for version in range(1, versions + 1):
    change(version)
    for _ in range(version % 4):
        read()
    if version % 16 == 0:  # so that copies are made of some, and served
        time.sleep(0.05)
sys.exit(sum(os.waitpid(child, 0)[1] for child in children))
"""


def test_t2_no_process_reads_a_version_older_than_the_last(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with HandDaemon(tmp_path / "source", places=True, small_bytes=0) as daemon:
        for attempt in range(10):  # on busy processors copies may come too late for all
            folder = daemon.source / str(attempt)
            folder.mkdir()
            daemon.run([sys.executable, "-c", CHANGER, folder, "300"])
            if daemon.counted()["tier_opens"] > 0:
                break
        assert daemon.counted()["tier_opens"] > 0

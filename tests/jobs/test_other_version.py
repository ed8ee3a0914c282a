"""Jobs and a service of two versions of Stoker on one machine: what tells them apart, at once."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from click.testing import CliRunner
from support.services import serving

from stoker.cli.root import root
from stoker.jobs import board, protocol
from stoker.jobs.board import JobTable, Kind
from stoker.jobs.holding import Holding
from stoker.jobs.protocol import VERSION
from stoker.jobs.survey import survey
from stoker.node import rendezvous
from stoker.node.messages import OtherVersion
from stoker.node.rendezvous import RendezvousFiles
from stoker.node.runtime_dir import runtime_dir
from stoker.policy.baselines import LRU
from stoker.store.registry import SharedArena, open_arena

OTHER = """
import sys
from stoker.node import rendezvous
from stoker.policy.baselines import LRU
from stoker.store.registry import open_arena

rendezvous._VERSION = 99
with open_arena("data", 100, 1 << 20, 100, LRU().regions()) as shared:
    assert shared.arena.put(1, b"theirs")
    print(shared.created, flush=True)
    sys.stdin.read()
    assert shared.arena.get(1) == b"theirs"
"""
"""A job whose messages are of another version."""


def open_one() -> SharedArena:
    return open_arena("data", 100, 1 << 20, 100, LRU().regions())


@contextlib.contextmanager
def other_version() -> Iterator[None]:
    """Run such a job; it must be unharmed at the end."""
    pipe = subprocess.PIPE
    job = subprocess.Popen([sys.executable, "-c", OTHER], stdin=pipe, stdout=pipe, text=True)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "True\n"
        yield
    finally:
        job.communicate()
    assert job.returncode == 0


def quickest(call: Callable[[], object]) -> float:
    """Return the seconds that ``call`` takes if nothing else runs at that moment."""
    seconds = []
    for _ in range(5):
        begin = time.monotonic()
        call()
        seconds.append(time.monotonic() - begin)
    return min(seconds)


def test_each_has_a_cache_of_its_own_and_ls_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with other_version():
        [theirs] = RendezvousFiles.all(runtime_dir())
        with pytest.raises(OtherVersion, match="messages of version 99"):
            rendezvous.inquire(theirs.socket)
        with open_one() as ours:
            assert (ours.created, ours.shared) == (True, True)
            assert ours.arena.get(1) is None
            with open_one() as again:
                assert not again.created
            holding = Holding()
            for _ in range(3):
                holding.look()
            assert holding.keys() == ["data"]
            holding.close()
            said = CliRunner().invoke(root, ["ls"]).output
            assert "1 more are of another version of Stoker" in said
        assert quickest(lambda: open_one().close()) < 0.2
    [record] = caplog.records
    assert "messages of version 99" in record.message
    assert not RendezvousFiles.all(runtime_dir())


def test_memory_of_another_layout_is_not_waited_for() -> None:
    with open_one() as theirs:
        (fd,) = theirs.arena.handle.fds
        layout = os.pread(fd, 4, 8)
        os.pwrite(fd, struct.pack("<I", 99), 8)

        def alone() -> None:
            with pytest.warns(RuntimeWarning, match=r"cannot share .* layout version 99"):
                ours = open_one()
            assert (ours.created, ours.shared) == (True, False)
            ours.close()

        assert quickest(alone) < 0.2
        os.pwrite(fd, layout, 8)
        with open_one() as ours:
            assert not ours.created


def test_a_service_of_another_version_is_done_without_and_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(memory=1):
        monkeypatch.setattr(protocol, "VERSION", 99)  # of who asks; the service has its own
        asked = ("k", 100, 1 << 20, 100.0, LRU().regions())
        assert protocol.capacity_allowed(*asked).capacity == 1 << 20
        [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert "without the service" in record.message
        assert f"messages of version {VERSION} and not 99" in record.message
        assert quickest(lambda: protocol.capacity_allowed(*asked)) < 0.2


def test_jobs_whose_rows_are_laid_out_otherwise_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_one() as shared:
        inode = os.fstat(shared.arena.handle.fds[0]).st_ino
        with JobTable(str(inode), 100) as ours:
            ours.take(1, Kind.TIME, "ours", 1.5)
            monkeypatch.setattr(board, "PREFIX", "jobs 00000000")
            with JobTable(str(inode), 100) as theirs:
                theirs.take(2, Kind.TIME, "theirs", 1.5)
                assert np.count_nonzero(theirs.board.jobs["token"]) == 1
                [cache] = survey()
                assert [job.name for job in cache.jobs] == ["ours"]

"""Workers of the inner loader begin, and end, with the training process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch
from support.processes import warm

from stoker import Cache
from stoker.node import memory
from stoker.pytorch import Loader, SampleDataset, torch_session
from stoker.pytorch.torch_session import BeginWorker
from stoker.source.held import MemorySource


def train(said: Connection, workers: list[str]) -> None:
    torch_session._LOOK = torch_session._GRACE = 0.1
    for when in workers:
        if not os.fork():
            work(said, os.getppid(), when)
    threading.Event().wait()


def work(said: Connection, parent: int, when: str) -> None:
    said.send(os.getpid())
    if when == "later":
        BeginWorker(None, "fork")(0)
    while os.getppid() == parent:
        time.sleep(0.01)
    if when == "at once":
        BeginWorker(None, "fork")(0)
    threading.Event().wait()


@pytest.mark.parametrize("workers", [["at once"], ["later"], ["later", "at once", "later"]])
def test_workers_end_after_training_was_killed_whatever_they_wait_for(workers: list[str]) -> None:
    ours, theirs = warm.Pipe(duplex=False)
    process = warm.Process(target=train, args=(theirs, workers))
    process.start()
    theirs.close()
    with ours:
        for _ in workers:
            assert ours.recv()
        process.kill()
        process.join()
        with pytest.raises(EOFError):  # which comes when all workers have ended
            ours.recv()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_stay_as_long_as_training_does(method: str) -> None:
    """By all ways to start them; with no time to look for another parent in between."""
    dataset = SampleDataset(MemorySource([bytes([n]) for n in range(40)]), ord)
    workers = 1 if method == "spawn" else 2  # which imports torch anew in each epoch
    options = {"num_workers": workers, "multiprocessing_context": method}
    cache = Cache(prefetch=0)
    with Loader(dataset, 4, cache=cache, worker_init_fn=hurry, **options) as loader:
        for _ in range(2):
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))


def hurry(worker: int) -> None:
    torch_session._LOOK = torch_session._GRACE = 0.0


def test_what_the_user_wants_done_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_session, "_end_after", lambda parent: None)
    monkeypatch.setattr(torch_session, "keep_freed_memory", lambda: None)  # for good, in here
    begun: list[int] = []
    BeginWorker(begun.append, "fork")(3)
    assert begun == [3]

    def refuse(worker: int) -> None:
        raise KeyError(worker)

    with pytest.raises(KeyError):
        BeginWorker(refuse, "fork")(0)


ALLOCATING = """
import resource, sys
from stoker.pytorch.torch_session import BeginWorker

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    batch = [b"x" * (3 << 20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

for who in sys.argv[1:]:
    if who == "worker":
        BeginWorker(None, "spawn")(0)
    print([faults() for _ in range(4)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told what to keep")
def test_a_worker_uses_the_memory_of_earlier_batches_again() -> None:
    """Or the kernel clears as much again for each; where the user has set that, it stays so."""
    pages = 4 * (3 << 20) // os.sysconf("SC_PAGE_SIZE")
    for more, who, are_kept in (
        ({}, ["another", "worker"], [False, True]),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, ["worker"], [False]),
    ):
        users_own = memory._USERS_OWN
        clean = {name: text for name, text in os.environ.items() if name not in users_own}
        command = [sys.executable, "-c", ALLOCATING, *who]
        done = subprocess.run(command, env=clean | more, capture_output=True, text=True, check=True)
        assert [int(faults) < pages / 4 for faults in done.stdout.split()] == are_kept

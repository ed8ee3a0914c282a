"""Workers of the inner loader begin, and end, with the training process."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest
import torch

from stoker import Cache
from stoker.node import heap
from stoker.pytorch import Loader, SampleDataset, torch_session
from stoker.pytorch.torch_session import BeginWorker
from stoker.source.in_memory import MemorySource

TRAINING = """
import multiprocessing, os, sys, threading, time
from stoker.pytorch import torch_session

torch_session._LOOK = torch_session._GRACE = 0.1

def worker(parent, when):
    print(os.getpid(), flush=True)
    if when == "later":
        torch_session.BeginWorker(None, "fork")(0)
    while os.getppid() == parent:
        time.sleep(0.01)
    if when == "at once":
        torch_session.BeginWorker(None, "fork")(0)
    threading.Event().wait()

multiprocessing.set_start_method("fork")
for when in sys.argv[1:]:
    multiprocessing.Process(target=worker, args=(os.getpid(), when)).start()
threading.Event().wait()
"""


@pytest.mark.parametrize("workers", [["at once"], ["later"], ["later", "at once", "later"]])
def test_workers_end_after_training_was_killed_whatever_they_wait_for(workers: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, *workers], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        for _ in workers:
            assert int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout.read() == ""  # which ends when all workers have ended


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

if sys.argv[1] == "worker":
    BeginWorker(None, "spawn")(0)
print([faults() for _ in range(4)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told what to keep")
def test_a_worker_uses_the_memory_of_earlier_batches_again() -> None:
    """Or the kernel clears as much again for each; where the user has set that, it stays so."""
    pages = 4 * (3 << 20) // os.sysconf("SC_PAGE_SIZE")
    for who, more, is_kept in (
        ("worker", {}, True),
        ("another", {}, False),
        ("worker", {"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
    ):
        users_own = heap._USERS_OWN
        clean = {name: text for name, text in os.environ.items() if name not in users_own}
        command = [sys.executable, "-c", ALLOCATING, who]
        done = subprocess.run(command, env=clean | more, capture_output=True, text=True, check=True)
        assert (int(done.stdout) < pages / 4) == is_kept

"""Jobs, a service and caches on disk of this Stoker and of an earlier one, on one machine.

``make upgrade-test`` installs the earlier one from a wheel, and names its Python in
``STOKER_TEST_OTHER``.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

OTHER = os.environ.get("STOKER_TEST_OTHER", "")
OURS = sys.executable
pytestmark = pytest.mark.skipif(not OTHER, reason="no other version is there: make upgrade-test")

NUM = 200
SERVICE = "import sys; from stoker.cli.root import root; sys.argv[0] = 'stoker'; root()"
JOB = """
import json, pickle, sys
import stoker
from stoker import Cache
from stoker._core import ABI
from stoker.node.rendezvous import RendezvousFiles
from stoker.node.runtime_dir import runtime_dir
from stoker.source import MemorySource
from stoker.testing.sources import SlowSource

seed, disk, state = int(sys.argv[1]), sys.argv[2] or None, sys.argv[3]
samples = [f"{i:08}".encode() * 50 for i in range(200)]
source = SlowSource(MemorySource(samples), latency=1e-3)
cache = Cache("100%", disk=disk, prefetch="64 KiB")
def say(**facts):
    print(json.dumps(facts), flush=True)
say(path=stoker.__file__, meets=RendezvousFiles.of(runtime_dir(), f"{ABI}").name, abi=ABI)
with stoker.Feed(source, 10, cache=cache, recipe="lru", seed=seed) as feed:
    if state and len(sys.argv) > 4:
        with open(state, "rb") as file:
            feed.load_state_dict(pickle.load(file))
    batches, ids = iter(feed), []
    for line in sys.stdin:  # so many batches more; 0: to the end of the epoch, and begin the next
        for _ in range(int(line) or 1000):
            batch = next(batches, None)
            if batch is None:
                break
            found = batch.ids.tolist()
            assert [bytes(sample) for sample in batch.data] == [samples[i] for i in found]
            ids += found
        stats = feed.stats
        say(ids=ids, fetched=stats.fetched)
        if state:
            with open(state, "wb") as file:
                pickle.dump(feed.state_dict(), file)
        if not int(line):
            batches, ids = iter(feed), []
"""
"""Prints what it is, and for each line of its input what this epoch has brought so far."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path


class Process:
    """A program of one of the versions, which exchanges lines; ended with it."""

    def __init__(self, python: str, program: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [python, "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, sign: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(sign)
        self.process.wait(60)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Job(Process):
    def __init__(
        self,
        python: str,
        seed: int,
        *options: str,
        disk: Path | str = "",
        state: Path | str = "",
    ) -> None:
        super().__init__(python, JOB, seed, disk, state, *options)
        self.about = json.loads(self.said())

    def ask(self, batches: int = 0) -> None:
        assert self.process.stdin is not None
        print(batches, file=self.process.stdin, flush=True)

    def told(self) -> dict[str, Any]:
        return json.loads(self.said())

    def epoch(self, batches: int = 0) -> dict[str, Any]:
        self.ask(batches)
        return self.told()

    def finish(self) -> None:
        """Let it end; the process that reads ahead may go on for others, with its output open."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0


class Service(Process):
    def __init__(self, python: str) -> None:
        super().__init__(python, SERVICE, "serve", "--memory", "64MiB")
        assert "serving" in self.said()

    def held(self, count: int) -> None:
        until(lambda: len(self.status()["idle"]) == count)

    def status(self) -> dict[str, Any]:
        program = "from stoker.jobs.protocol import ask; print(ask('list'))"
        done = subprocess.run([OURS, "-c", program], capture_output=True, text=True, check=True)
        return ast.literal_eval(done.stdout)


def test_it_is_another_one() -> None:
    with Job(OTHER, 0) as theirs, Job(OURS, 0) as ours:
        assert theirs.about["path"] != ours.about["path"]


def test_side_by_side_each_sample_is_right_and_read_once_for_each_cache() -> None:
    with Job(OTHER, 1) as theirs, Job(OURS, 2) as ours:
        shared = theirs.about["meets"] == ours.about["meets"]
        print("one cache for both" if shared else "a cache for each")
        jobs = theirs, ours
        for job in jobs:
            job.ask()
        first = [job.told() for job in jobs]
        assert [sorted(told["ids"]) for told in first] == [list(range(NUM))] * 2
        assert sum(told["fetched"] for told in first) == (NUM if shared else 2 * NUM)
        again = [job.epoch() for job in jobs]
        assert [sorted(told["ids"]) for told in again] == [list(range(NUM))] * 2
        assert [told["fetched"] for told in again] == [told["fetched"] for told in first]
        for job in jobs:
            job.finish()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("was, comes", [(OTHER, OURS), (OURS, OTHER)], ids=["forward", "back"])
def test_a_service_that_is_replaced_under_a_job_loses_nothing(
    was: str, comes: str, sign: signal.Signals
) -> None:
    with Service(was) as before, Job(was, 1) as job:
        assert len(job.epoch(NUM // 20)["ids"]) == NUM // 2
        before.end(sign)
        assert len(job.epoch(NUM // 40)["ids"]) == 3 * NUM // 4  # without any
        with Service(comes) as after, Job(comes, 2) as other:
            told = job.epoch()
            assert sorted(told["ids"]) == list(range(NUM))
            assert told["fetched"] == NUM
            assert sorted(other.epoch()["ids"]) == list(range(NUM))
            assert job.epoch()["fetched"] == NUM
            job.finish()
            other.finish()
            own = {each.about["meets"] for each in (job, other)}
            after.held(len(own) if job.about["abi"] == other.about["abi"] else 1)
            with Job(was if len(own) == 1 else comes, 3) as later:
                assert later.epoch()["fetched"] == 0  # the service kept what it found
                later.finish()


def test_a_service_of_the_other_version_answers_or_refuses_at_once() -> None:
    program = """
import time
from stoker.jobs.protocol import ask
seconds = []
for _ in range(5):
    begin = time.monotonic()
    try:
        said = ask("list")["pid"]
    except OSError as error:
        said = error
    seconds.append(time.monotonic() - begin)
print(said, min(seconds))
"""
    for serving, asking in ((OTHER, OURS), (OURS, OTHER)):
        with Service(serving):
            done = subprocess.run([asking, "-c", program], capture_output=True, text=True)
            assert float(done.stdout.split()[-1]) < 0.2, done


def test_a_cache_on_disk_is_used_again_or_rebuilt(place: Path) -> None:
    disk = place / "disk"
    with Job(OTHER, 1, disk=disk) as theirs:
        assert theirs.epoch()["fetched"] == NUM
        theirs.finish()
    with Job(OURS, 2, disk=disk) as ours:
        told = ours.epoch()
        assert sorted(told["ids"]) == list(range(NUM))
        assert told["fetched"] == (0 if theirs.about["abi"] == ours.about["abi"] else NUM)
        ours.finish()
    with Job(OURS, 3, disk=disk) as ours:
        assert ours.epoch()["fetched"] == 0
        ours.finish()


def test_a_run_is_resumed_by_the_next_version_in_the_middle_of_an_epoch(place: Path) -> None:
    with Job(OTHER, 7, state=place / "state") as theirs:
        served = theirs.epoch(7)["ids"]
        theirs.finish()
    with Job(OURS, 7, "resume", state=place / "state") as ours:
        rest = ours.epoch()["ids"]
        ours.finish()
    assert sorted(served + rest) == list(range(NUM))

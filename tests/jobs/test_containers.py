"""Jobs and the service in containers: they have the runtime directory in common, no namespace."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import containers
from support.containers import MemoryGroup, memory_groups
from support.processes import processes_of
from support.waiting import until

from stoker.jobs.protocol import ask
from stoker.jobs.survey import survey

NUM = 200
SERVICE = "import sys; from stoker.cli.root import root; sys.argv[0] = 'stoker'; root()"
JOB = """
import json, os, sys
import stoker
from stoker import Cache
from stoker.jobs import Sharing
from stoker.source import MemorySource
from stoker.testing.sources import SlowSource

seed, prefetch, latency = int(sys.argv[1]), sys.argv[2], float([*sys.argv, "1e-3"][3])
source = SlowSource(MemorySource([f"{i:08}".encode() * 50 for i in range(200)]), latency=latency)
cache = Cache("100%", prefetch=prefetch, sharing=Sharing(f"seed {seed}"))
def say(**facts):
    print(json.dumps(facts), flush=True)
kinds = ("mnt", "pid", "user", "net", "ipc", "uts")
say(user=os.getuid(), namespaces=[os.readlink(f"/proc/self/ns/{k}") for k in kinds])
with stoker.Feed(source, 10, cache=cache, recipe="lru", seed=seed, decode=bytes) as feed:
    for line in sys.stdin:  # an epoch for each line, of so many batches
        ids = []
        for _, batch in zip(range(int(line)), feed):
            ids += batch.ids.tolist()
        say(ids=ids, hits=feed.stats.hits, fetched=feed.stats.fetched)
"""
"""Prints what it is, and for each line of its input what an epoch gave."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    containers.need_containers()
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    yield tmp_path


class Pod:
    """A process in a container; ended with it."""

    def __init__(self, place: Path, user: int, program: str, *arguments: object) -> None:
        self.process = containers.start(
            program, *arguments, user=user, runtime=place / "run", folder=place
        )

    def ask(self, line: object) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # and the container with it
        self.process.communicate()


def end(pod: Pod) -> None:
    out, _ = pod.process.communicate()
    assert pod.process.returncode == 0, out


def test_a_cache_passes_between_containers_of_other_users_and_outlives_its_job(
    place: Path,
) -> None:
    own = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in containers.KINDS]
    seen = []
    with Pod(place, 1000, SERVICE, "serve", "--memory", "64MiB"):
        until(lambda: (place / "run" / "service.sock").exists())
        for user in (1001, 1002):
            with Pod(place, user, JOB, user, 0) as job:
                about = job.said()
                assert about["user"] == user
                seen.append(about["namespaces"])
                job.ask(NUM // 10)
                epoch = job.said()
                assert sorted(epoch["ids"]) == list(range(NUM))
                assert epoch["fetched"] == (NUM if user == 1001 else 0)
                assert epoch["hits"] == (0 if user == 1001 else NUM)
                end(job)
    for spaces in zip(own, *seen, strict=True):
        assert len(set(spaces)) == 3, "the containers share a namespace"


def test_containers_that_train_at_once_read_each_sample_once(place: Path) -> None:
    with Pod(place, 1001, JOB, 1, 0) as one, Pod(place, 1002, JOB, 2, 0) as two:
        for pod in (one, two):
            pod.said()
            pod.ask(NUM // 10)
        epochs = [pod.said() for pod in (one, two)]
        assert [sorted(epoch["ids"]) for epoch in epochs] == [list(range(NUM))] * 2
        assert sum(epoch["fetched"] for epoch in epochs) == NUM
        [cache] = survey()  # from outside of both
        assert {job.name for job in cache.jobs} == {"seed 1", "seed 2"}


def test_a_container_that_is_killed_takes_neither_cache_nor_prefetch_from_the_other(
    place: Path,
) -> None:
    def readers() -> list[int]:
        return processes_of("stoker.prefetch.process", place)

    with Pod(place, 1001, JOB, 1, "1 MiB") as one, Pod(place, 1002, JOB, 2, "1 MiB") as two:
        spaces = [pod.said()["namespaces"][1] for pod in (one, two)]
        one.ask(NUM // 20)
        first = one.said()
        assert len(first["ids"]) == NUM // 2
        until(readers)
        assert [space_of(reader) for reader in readers()] == spaces[:1]
        two.ask(NUM // 20)
        two.said()
        one.process.kill()  # a pod evicted: all of its processes are gone at once
        one.process.wait()
        two.ask(NUM // 10)
        epoch = two.said()
        assert sorted(epoch["ids"]) == list(range(NUM))
        until(lambda: [space_of(reader) for reader in readers()] == spaces[1:])
        end(two)


def test_pods_that_are_evicted_while_they_read_cost_the_others_nothing(place: Path) -> None:
    with Pod(place, 1001, JOB, 1, 0) as two:
        two.said()
        two.ask(1)
        two.said()
        with (
            Pod(place, 1000, SERVICE, "serve") as service,
            Pod(place, 1002, JOB, 2, 0, 0.05) as one,
        ):
            one.said()
            one.ask(1)
            one.said()
            cached = entries()
            one.ask(NUM // 10)
            until(lambda: entries() > cached)
            for evicted in (one, service):  # one has claimed what it reads
                evicted.process.kill()
                evicted.process.wait()
        two.ask(NUM // 10)
        epoch = two.said()
        assert sorted(epoch["ids"]) == list(range(NUM))
        with Pod(place, 1003, SERVICE, "serve"):
            until(serves)
            end(two)
            with Pod(place, 1004, JOB, 3, 0) as later:
                later.said()
                later.ask(NUM // 10)
                assert later.said()["fetched"] == 0
                end(later)


def entries() -> int:
    """Return how many samples the only cache has."""
    [cache] = survey()
    return int(cache.stats["entries"])


def serves() -> bool:
    """Whether a service answers, and holds a cache."""
    with contextlib.suppress(OSError):
        return bool(ask("list")["memory_bytes"])
    return False


def space_of(process: int) -> str:
    return str(Path(f"/proc/{process}/ns/pid").readlink())


# --- who is charged ---

MIB = 1 << 20
HOLDER = """
import sys
from stoker.errors import CapacityError
from stoker.policy.baselines import LRU
from stoker.store.registry import open_arena

def turn(said):
    print(said, flush=True)
    sys.stdin.readline()

turn("ready")
try:
    with open_arena("charged", 64, 64 << 20, 1 << 20, LRU().regions()) as shared:
        if sys.argv[1:] == ["fill"]:
            for number in range(60):
                assert shared.arena.put(number, bytes(1 << 20))
        turn(f"holds {sum(shared.arena.get(number) is not None for number in range(64))}")
except CapacityError as error:
    print(error, flush=True)
"""
"""Holds a cache of 64 MiB, which it makes unless it is there, and reads what is in it."""


class Holder:
    """A process in a control group, which does a step for each line."""

    def __init__(self, group: MemoryGroup, *arguments: str) -> None:
        program = group.command(sys.executable, "-c", HOLDER, *arguments)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True)
        self.heard = self._line()

    def step(self) -> str:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def test_the_memory_of_a_cache_is_charged_to_who_makes_it_not_to_who_fills_it() -> None:
    with (
        memory_groups(2) as (makers, fillers),
        Holder(makers) as maker,
        Holder(fillers, "fill") as filler,
    ):
        before = makers.used, fillers.used
        assert maker.step() == "holds 0\n"
        assert makers.used - before[0] >= 64 * MIB  # reserved at once, before a sample is there
        assert filler.step() == "holds 60\n"
        assert fillers.used - before[1] < 16 * MIB
        maker.step()
        maker.process.wait()
        assert makers.used >= 64 * MIB  # also when it has ended, while others hold the cache
        assert fillers.used - before[1] < 16 * MIB


def test_a_container_whose_limit_is_too_low_gets_numbers_and_can_use_the_cache_of_another() -> None:
    with memory_groups(2) as (small, large), Holder(small) as job, Holder(large, "fill") as other:
        small.limit(small.used + 32 * MIB)
        assert other.step() == "holds 60\n"
        assert job.step() == "holds 60\n"
    with memory_groups(1) as (small,), Holder(small) as job:
        small.limit(small.used + 32 * MIB)
        assert re.search(r"64\.0 MiB .* 3[12]\.\d MiB are free here .*limits", job.step())

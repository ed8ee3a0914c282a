"""Trainings whose prefetch process was started by the service: neither ends with the other."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.containers import memory_groups, need_containers
from support.processes import processes_of, stop
from support.services import serving
from support.waiting import until

from stoker.cli.root import root
from stoker.jobs.protocol import ask
from stoker.node.hosting import host_path
from stoker.node.runtime_dir import runtime_dir

NUM = 200
SERVICE = "import sys; from stoker.cli.root import root; sys.argv[0] = 'stoker'; root()"
JOB = """
import json, sys
import stoker
from stoker import Cache
from stoker.node import hosting
from stoker.source import MemorySource
from stoker.testing.sources import SlowSource

hosting._PATIENCE = float(sys.argv[2])
source = SlowSource(MemorySource([f"{i:08}".encode() * 50 for i in range(200)]), latency=1e-3)
cache = Cache("100%", prefetch="1 MiB")
seed = int(sys.argv[1])
with stoker.Feed(source, 10, cache=cache, recipe="lru", seed=seed, decode=bytes) as feed:
    epoch = iter(feed)
    for line in sys.stdin:  # so many batches for each line
        ids = []
        for _, batch in zip(range(int(line)), epoch):
            assert all(batch.data[n] == f"{i:08}".encode() * 50 for n, i in enumerate(batch.ids))
            ids += batch.ids.tolist()
        print(json.dumps(ids), flush=True)
        if len(ids) < 10 * int(line):
            epoch = iter(feed)
"""
"""Prints for each line of its input the ids of so many batches; fewer at the end of an epoch."""
PATIENT = 60.0  # seconds that a job waits for the service: on a busy machine it takes its time


class Job:
    """A training in a session of its own, as a batch system starts it."""

    def __init__(
        self, seed: int, before: list[str] | None = None, patience: float = PATIENT
    ) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*(before or []), sys.executable, "-W", "error", "-c", JOB, str(seed), str(patience)],
            stdin=pipe,
            stdout=pipe,
            text=True,
            start_new_session=True,
        )
        self._epoch: list[int] = []

    def train(self, batches: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(batches, file=self.process.stdin, flush=True)
        self._epoch += json.loads(self.process.stdout.readline())

    def finish(self) -> None:
        """Train to the end of the epoch; it must have had each sample once."""
        self.train(NUM)
        assert sorted(self._epoch) == list(range(NUM))
        self._epoch = []

    def kill(self) -> None:
        """End it as a batch system does: all that it started, at once."""
        everything = [self.process.pid, *descendants(self.process.pid)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in everything:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for task in Path("/proc", str(pid), "task").iterdir():
            with contextlib.suppress(OSError):  # a thread of it has
                for each in map(int, (task / "children").read_text().split()):
                    found += [each, *descendants(each)]
    return found


class Serving:
    """`stoker serve` in a process of its own."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-c", SERVICE, "serve", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "serving" in self.process.stdout.readline()
        self.pid = self.process.pid

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    until(lambda: not fetchers(tmp_path))


def fetchers(place: Path) -> list[int]:
    return processes_of("stoker.prefetch.process", place)


def parent_of(pid: int) -> int | None:
    """Who started it, or took it on; None if it is gone."""
    try:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def fetcher(place: Path) -> int:
    """The only one, once it needs nothing more of who started it."""
    until(lambda: any(lock.read_text() for lock in runtime_dir().glob("*.prefetch-lock")))
    until(lambda: len(fetchers(place)) == 1)  # one that put itself into the background is gone
    [pid] = fetchers(place)
    return pid


def hosted() -> int:
    return int(ask("list")["hosted"])


def test_a_job_that_is_killed_with_all_it_started_takes_no_fetcher_from_another(
    place: Path,
) -> None:
    with Serving() as service, Job(1) as one, Job(2) as two:
        one.train(3)
        first = fetcher(place)
        assert parent_of(first) == service.pid
        assert os.getsid(first) == first
        assert Path(f"/proc/{first}/cgroup").read_text() == Path("/proc/self/cgroup").read_text()
        two.train(3)
        until(lambda: hosted() == 1)
        assert "hosts 1 process of jobs" in CliRunner().invoke(root, ["ls"]).output
        one.kill()
        two.finish()
        two.train(5)
        assert fetchers(place) == [first]
        two.finish()
        two.process.communicate()
        until(lambda: hosted() == 0)
        assert not Path("/proc", str(first)).exists()  # not even as a zombie


def test_without_a_service_the_other_job_starts_one_of_its_own(place: Path) -> None:
    """What the service is for; and nothing is lost then either."""
    with Job(1) as one, Job(2) as two:
        one.train(3)
        first = fetcher(place)
        two.train(3)
        os.kill(first, signal.SIGKILL)  # as one of the first job's control group
        one.kill()
        two.finish()
        two.train(3)
        until(lambda: set(fetchers(place)) - {first})
        two.finish()


def test_a_control_group_that_is_killed_whole_takes_no_fetcher_from_another(place: Path) -> None:
    with memory_groups(1) as (group,), Serving(), Job(1, group.command()) as one, Job(2) as two:
        one.train(3)
        first = fetcher(place)
        two.train(3)
        members = (group.folder / "cgroup.procs").read_text().split()
        assert str(one.process.pid) in members and str(first) not in members
        for pid in map(int, members):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.process.wait()
        until(lambda: not (group.folder / "cgroup.procs").read_text())
        two.finish()
        assert fetchers(place) == [first]


def test_the_service_is_killed_and_replaced_and_jobs_keep_their_fetcher(place: Path) -> None:
    with Serving() as service, Job(1) as one:
        one.train(3)
        first = fetcher(place)
        assert parent_of(first) == service.pid
        service.process.kill()
        service.process.wait()
        one.train(3)
        with Serving(), Job(2) as two:
            two.train(3)
            one.finish()
            two.finish()
            assert fetchers(place) == [first]
            assert hosted() == 0


def test_the_service_ends_in_order_and_jobs_keep_their_fetcher(place: Path) -> None:
    with Serving() as service, Job(1) as one:
        one.train(3)
        first = fetcher(place)
        service.process.terminate()
        assert service.process.wait(60) == 0
        assert not host_path().exists()
        one.finish()
        assert fetchers(place) == [first]


def test_a_stopped_service_costs_a_job_nothing_but_a_moment(place: Path) -> None:
    with Serving() as service:
        stop(service.pid)
        with Job(1, patience=0.25) as one:
            try:
                one.train(3)
                first = fetcher(place)
                assert parent_of(first) != service.pid
            finally:
                os.kill(service.pid, signal.SIGCONT)
            one.finish()
            assert fetchers(place) == [first]
            assert hosted() == 0


def test_a_fetcher_that_dies_is_started_by_its_job(place: Path) -> None:
    with Serving() as service, Job(1) as one:
        one.train(3)
        first = fetcher(place)
        os.kill(first, signal.SIGKILL)
        one.train(3)
        until(lambda: {parent_of(each) for each in fetchers(place)} - {None, service.pid})
        one.finish()
        until(lambda: hosted() == 0)


def test_a_job_in_a_container_has_a_fetcher_of_its_own(place: Path) -> None:
    """It may see other files under the same names."""
    need_containers()
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    with Serving() as service, Job(1, unshare) as one:
        one.train(3)
        own = fetcher(place)
        assert parent_of(own) != service.pid
        assert Path(f"/proc/{own}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()
        one.finish()
        assert hosted() == 0


def test_the_unit_of_systemd_ended_with_a_process_that_it_hosts() -> None:
    """When one was killed for want of memory. And it hosted nothing once rights were compared."""
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(Path(__file__).parents[2] / "docs" / "systemd" / "stoker.service")
    service = dict(unit["Service"])
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    assert "NoNewPrivileges" not in service


def test_a_service_that_is_to_host_nothing(place: Path) -> None:
    with Serving("--no-hosting") as service, Job(1) as one:
        one.train(3)
        assert parent_of(fetcher(place)) != service.pid
        assert not host_path().exists()
        one.finish()


def test_a_service_in_a_program_reaps_what_it_hosts(place: Path) -> None:
    with serving() as service, Job(1) as one:
        one.finish()
        one.train(3)
        first = fetcher(place)
        assert parent_of(first) == os.getpid()
        until(lambda: service.answer({"ask": "list"}, is_owner=True)["hosted"] == 1)
        one.process.communicate()
        until(lambda: hosted() == 0)
        assert not Path("/proc", str(first)).exists()

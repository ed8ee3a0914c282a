"""Real jobs that fetch over a link which the service limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from click.testing import CliRunner
from support.services import serving
from support.waiting import until

from jobs.test_admission import listing
from stoker import Cache, Feed
from stoker.cli.root import root
from stoker.errors import ConfigError
from stoker.jobs import Sharing
from stoker.jobs.quotas import Quota
from stoker.jobs.service import Service, ServiceSettings
from stoker.node.bandwidth import FetchShare, granted_bytes
from stoker.source.held import MemorySource
from stoker.testing.sources import SlowSource

NUM, SIZE, BATCH = 1000, 2_000, 10
RATE = 1_500_000
ENOUGH = 1_500_000


class Job(threading.Thread):
    """Reads a data set of its own, most of which it cannot cache, until it is told to stop."""

    def __init__(self, number: int, weight: float, prefetch: int | str) -> None:
        super().__init__()
        self.number, self.weight, self.prefetch = number, weight, prefetch
        self.read = 0
        """Bytes."""
        self.is_over, self.may_read = threading.Event(), threading.Event()
        self.may_read.set()

    def run(self) -> None:
        samples = [bytes([self.number]) * SIZE] * NUM
        source = SlowSource(MemorySource(samples), latency=0.0002, tail=0.0)
        sharing = Sharing(f"job {self.number}", weight=self.weight)
        cache = Cache("5%", prefetch=self.prefetch, sharing=sharing)
        with Feed(source, BATCH, cache=cache, recipe="minio", decode_threads=2) as feed:
            while not self.is_over.is_set():
                for _ in feed:
                    self.may_read.wait()
                    self.read += BATCH * SIZE
                    if self.is_over.is_set():
                        break


@contextmanager
def running(weights: list[float], prefetch: int | str = 0) -> Iterator[list[Job]]:
    jobs = [Job(number, weight, prefetch) for number, weight in enumerate(weights)]
    for job in jobs:
        job.start()
    try:
        yield jobs
    finally:
        for job in jobs:
            job.is_over.set()
            job.may_read.set()
        for job in jobs:
            job.join()


def await_shares(jobs: list[Job], shares: list[float], within: float) -> None:
    """Wait until jobs read by these shares, from look to look."""

    def do_so() -> bool:
        before = np.array([job.read for job in jobs])
        until(lambda: sum(job.read for job in jobs) - before.sum() >= ENOUGH)
        read = np.array([job.read for job in jobs]) - before
        return bool(np.abs(read / read.sum() - shares).max() <= within)

    until(do_so)


def test_jobs_fetch_by_their_weights_and_use_what_an_idle_one_leaves() -> None:
    with serving(bandwidth=RATE), running([4, 2, 1, 1]) as jobs:
        await_shares(jobs, [0.5, 0.25, 0.125, 0.125], within=0.05)
        jobs[0].may_read.clear()
        await_shares(jobs, [0, 0.5, 0.25, 0.25], within=0.05)
        jobs[0].may_read.set()
        await_shares(jobs, [0.5, 0.25, 0.125, 0.125], within=0.05)


def test_jobs_of_a_quota_have_its_weight_together_whatever_they_say() -> None:
    quotas = Quota("job [01]", weight=1), Quota("job 2", weight=3)
    with serving(bandwidth=RATE, quotas=quotas), running([1000, 1, 1]) as jobs:
        jobs[1].may_read.clear()
        await_shares(jobs, [0.25, 0, 0.75], within=0.05)
        jobs[1].may_read.set()

        def have_their_shares() -> bool:
            before = np.array([job.read for job in jobs])
            until(lambda: sum(job.read for job in jobs) - before.sum() >= ENOUGH)
            read = np.array([job.read for job in jobs]) - before
            return bool(abs(read[2] / read.sum() - 0.75) < 0.05 and read.all())

        until(have_their_shares)
        assert len(granted_bytes()) == 2
        assert "quota of jobs named job [01]: memory" in listing()
        assert "weight 3" in listing()


def test_processes_that_read_ahead_take_their_jobs_share() -> None:
    with serving(bandwidth=RATE), running([3, 1], prefetch="64KiB") as jobs:
        await_shares(jobs, [0.75, 0.25], within=0.05)
        assert len(granted_bytes()) == 2, "a prefetch process asks as the job that it reads for"


def test_ls_says_what_the_limit_is() -> None:
    with serving(bandwidth=500 << 20):
        assert "fetches 500.0 MiB a second at most" in CliRunner().invoke(root, ["ls"]).output
    with serving(bandwidth=1), pytest.raises(ConfigError, match="runs already"):
        Service(ServiceSettings(bandwidth=10))


def test_without_a_service_weights_change_nothing() -> None:
    with serving(bandwidth=RATE):
        FetchShare(1).wait(1 << 30)
    with running([4, 1]) as jobs:
        until(lambda: all(job.read > ENOUGH // 2 for job in jobs))
    assert set(granted_bytes()) == {1}


@pytest.mark.parametrize("weight", [0, -1, float("nan"), 1e9])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"weight=.*give 0.001 to 1,000"):
        Sharing(weight=weight)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="bandwidth=0"):
        ServiceSettings(bandwidth=0)

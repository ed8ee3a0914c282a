"""A machine whose link goes down, and comes up again or not."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.numbered import NUM
from support.redis_servers import needs_server
from support.waiting import until

from cluster.machines import Machine, server_on

HERE = Path(__file__).parent
LATE = 5.0
"""Seconds within which any batch comes; the pool's own bound is half a second."""
CUT = 4.0
"""Seconds that the link is down, at least."""


def start(machine: Machine, job: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(
        machine.command(sys.executable, str(HERE / job), *arguments),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Stepping:
    """A job that takes a step when it is told to (``stepping_job.py``)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.stats: dict[str, Any] = {"fetched": 0}
        """Counts after the latest step."""

    def step(self) -> list[int]:
        """The samples of the next batch, none where the epoch is over."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1]
        said = json.loads(line)
        assert said["seconds"] < LATE
        self.stats = said["stats"]
        samples: list[int] = said["samples"]
        return samples

    def rest(self) -> list[int]:
        """The samples of the rest of the epoch."""
        seen: list[int] = []
        while batch := self.step():
            seen += batch
        return seen

    def epoch(self) -> int:
        """How many samples of a whole epoch, in which all of them were right, the source gave."""
        before = self.stats["fetched"]
        assert sorted(self.rest()) == list(range(NUM))
        assert self.stats["hits"] + self.stats["fetched"] == self.stats["accesses"]
        return int(self.stats["fetched"] - before)


@contextlib.contextmanager
def stepping(machine: Machine, *arguments: str, folder: Path) -> Iterator[Stepping]:
    process = start(machine, "stepping_job.py", *arguments, STOKER_RUNTIME_DIR=str(folder / "run"))
    try:
        yield Stepping(process)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        assert "is bypassed for now" in complaints
    finally:
        process.kill()
        process.communicate()


def epochs_until(job: Stepping, is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so(job.epoch()):
        assert time.monotonic() < deadline


@needs_server
@pytest.mark.parametrize(
    ("end", "num_workers", "ahead"), [(0, "0", "0"), (1, "2", "1MiB")], ids=["node", "server"]
)
def test_a_node_cut_off_from_the_pool_goes_on_and_finds_it_again(
    end: int,
    num_workers: str,
    ahead: str,
    machines: tuple[Machine, Machine],
    tmp_path: Path,
) -> None:
    """On its own end the link is seen to be down, on the server's nothing is heard any more."""
    node, far = machines
    pool = f"valkey://{far.address}?timeout=0.5"
    with server_on(far) as server, stepping(node, pool, num_workers, ahead, folder=tmp_path) as job:
        epochs_until(job, lambda fetched: not fetched)
        until(lambda: server.dbsize() == NUM)
        seen = [number for _ in range(5) for number in job.step()]
        machines[end].cut()
        mended_from = time.monotonic() + CUT
        seen += job.rest()
        assert sorted(seen) == list(range(NUM))
        epochs_until(job, lambda _: time.monotonic() > mended_from)
        assert job.stats["pool_open"] == 1
        assert job.stats["failed"] == job.stats["bypassed"] == 0
        machines[end].mend()
        epochs_until(job, lambda fetched: not fetched)
        assert job.stats["pool_open"] == 0
        server.flushall()
        # And it is written to; what stays in memory need not come there again.
        epochs_until(job, lambda _: server.dbsize() > NUM / 2)
        assert job.stats["pool_damaged"] == 0


def test_ranks_parted_for_good_fail_and_say_so(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """Between steps of an epoch nobody is asked; the next epoch is made from all ranks' scores."""
    address, timeout = machines[0].address, "3"
    ranks = [
        start(
            machine,
            "parted_job.py",
            *(str(rank), address, timeout),
            STOKER_RUNTIME_DIR=str(tmp_path / str(rank)),
            STOKER_NODE=f"n{rank}",
            GLOO_SOCKET_IFNAME="eth0",
        )
        for rank, machine in enumerate(machines)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n", process.communicate()[1]
        machines[1].cut()
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for rank, process in enumerate(ranks):
            said, complaints = process.communicate(timeout=60)
            assert said == "epoch 0 is over\n"
            assert process.returncode == 1
            error = f"RanksUnavailable: rank {rank} of 2 cannot exchange with the others: "
            assert error in complaints.splitlines()[-1], complaints
    finally:
        for process in ranks:
            process.kill()
            process.communicate()

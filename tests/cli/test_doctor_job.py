"""`stoker doctor --job`: real jobs with a limit that is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.waiting import until

from stoker.cli.root import root
from stoker.jobs.survey import survey

TRAINING = """
import sys, time
import stoker
from stoker.jobs import Sharing
from stoker.source import MemorySource
from stoker.testing import SlowSource

name, latency, step = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
source = SlowSource(MemorySource([bytes(100)] * 200), latency=latency)
cache = stoker.Cache("30%", prefetch=0, sharing=Sharing(name))
with stoker.Feed(source, 10, cache=cache, recipe="minio", decode_threads=1) as feed:
    while True:
        for batch in feed:
            time.sleep(step)
"""


@contextmanager
def training(name: str, *, latency: float, step: float) -> Iterator[None]:
    command = [sys.executable, "-c", TRAINING, name, str(latency), str(step)]
    with subprocess.Popen(command) as process:
        try:
            until(lambda: any(job.counts["hits"] for cache in survey() for job in cache.jobs))
            yield
        finally:
            process.kill()


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["doctor", *arguments], terminal_width=200)


def told_at_last(is_so: Callable[[Any], bool], *arguments: str) -> None:
    """Ask until it is so: on a busy machine other things may hold a job up for some seconds."""
    until(lambda: is_so(json.loads(doctor(*arguments, "--json").output)[0]), 120)


def test_a_job_bound_by_storage_is_told_what_to_change() -> None:
    with training("slow storage", latency=0.05, step=0.0):
        told = doctor("--job", "slow storage", "--seconds", "3")
        assert told.exit_code == 0, told.output
        assert "waits while workers read, or wait for reads  <- the limit" in told.output
        assert "Cache(prefetch=)" in told.output
        (view,) = json.loads(doctor("--job", "slow storage", "--seconds", "3", "--json").output)
        assert view["bound"] == "storage"
        assert view["headspace"] > 2
        assert sum(view["stages"].values()) == pytest.approx(1)
        assert view["stages"]["storage"] == max(view["stages"].values())


def test_a_job_bound_by_its_own_step_has_nothing_to_gain() -> None:
    with training("busy", latency=0.0, step=0.1):
        told_at_last(
            lambda view: view["bound"] == "compute" and view["headspace"] < 1.2,
            *("--job", "busy", "--seconds", "3"),
        )
        missing = doctor("--job", "<other>", "--seconds", "0.5")
        assert missing.exit_code == 1
        assert "no job is named '<other>'; these share a cache: 'busy'" in missing.output


def test_a_probe_measures_what_a_job_would_gain() -> None:
    with training("probed", latency=0.02, step=0.02):  # no wait: 0.02 s a batch, else 0.2 or so
        told_at_last(
            lambda view: 2 < (view["headspace_measured"] or 0) < 20,
            *("--job", "probed", "--seconds", "3", "--probe"),
        )
        told = doctor("--job", "probed", "--seconds", "3", "--probe")
        assert "(measured by a probe)" in told.output


def test_without_a_job_it_says_so() -> None:
    assert "no running job shares a cache" in doctor("--job", "x").output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--job", "x", "data"],
        ["--socket", "x"],
        ["--probe"],
        ["--job", "x", "--probe", "--socket", "s"],
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str]) -> None:
    assert doctor(*arguments).exit_code == 2

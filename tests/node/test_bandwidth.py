"""The bandwidth that processes share through a file."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.waiting import until

from stoker.errors import ConfigError
from stoker.node import bandwidth
from stoker.node.bandwidth import FetchShare, granted_bytes, limit_bandwidth


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def test_without_a_limit_nothing_waits_and_no_file_is_made(folder: Path) -> None:
    share = FetchShare(1)
    share.wait(1 << 40)
    assert not share.seconds_to_wait()
    assert not (folder / bandwidth.NAME).exists()


def test_a_process_waits_once_it_has_had_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1000.0, sleep=time.sleep)
    monkeypatch.setattr(bandwidth, "time", clock)  # it stands: what is granted depends on it
    limit_bandwidth(1000)
    share = FetchShare(1)
    share.wait(1_000_000)
    assert share.seconds_to_wait() > 0, "what was read is paid a tenth of a second at a time"
    copy = pickle.loads(pickle.dumps(share))
    assert (copy.token, copy.weight) == (1, 1.0)
    assert copy.seconds_to_wait() > 0, "balances are a process's own, the limit is for all"
    assert 0 < granted_bytes()[1] < 10_000


def test_processes_of_no_job_never_wait() -> None:
    limit_bandwidth(1)
    share = FetchShare(0)
    for _ in range(3):
        share.wait(1 << 30)
    assert granted_bytes() == {}


def test_a_limit_that_is_lifted_or_not_renewed_ends() -> None:
    limit_bandwidth(1000)
    share = FetchShare(1)
    share.wait(10_000)
    assert share.seconds_to_wait()
    limit_bandwidth(0)
    assert not share.seconds_to_wait()


def test_a_new_limit_is_seen_soon_by_a_process_that_found_none() -> None:
    share = FetchShare(1)
    assert not share.seconds_to_wait()
    limit_bandwidth(1000)

    def must_wait() -> bool:
        share.spend(1_000_000)
        return share.seconds_to_wait() > 0

    until(must_wait)


def test_a_killed_process_leaves_nothing_locked() -> None:
    limit_bandwidth(1e9)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        share = FetchShare(2)
        os.write(told, b"!")
        while True:
            share.wait(1)
    os.read(ready, 1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(told)
    began = time.monotonic()
    FetchShare(1).wait(1)
    assert time.monotonic() - began < 30


def test_where_the_file_is_not_ours_alone_nothing_waits(folder: Path) -> None:
    limit_bandwidth(1)
    (folder / bandwidth.NAME).chmod(0o666)
    share = FetchShare(1)
    for _ in range(3):
        share.wait(1 << 30)
    assert granted_bytes() == {}


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight="):
        FetchShare(1, weight)

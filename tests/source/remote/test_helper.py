"""The helper process: what it survives, what it passes on, and when it is not used."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError, SourceUnavailable
from stoker.source import Pace, Retry
from stoker.source.remote import client as client_module
from stoker.source.remote import helper as helper_module
from stoker.source.remote.backend import address_of
from stoker.source.remote.client import Client
from stoker.source.remote.request import Wanted


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    (tmp_path / "x").write_bytes(b"hello")
    client = Client(address_of(f"file://{tmp_path}").location, Pace(retry=Retry(deadline=0.5)))
    yield client
    client.close()


def fetch(client: Client, tmp_path: Path) -> bytes:
    five = np.array([5])
    wanted = Wanted(
        keys=[f"{tmp_path}/x"[1:]],
        starts=np.array([-1]),
        lengths=five,
        sizes=five,
        tags=np.zeros(1, np.uint64),
    )
    data, failures = client.fetch(wanted)
    assert failures == {}
    return data.tobytes()


def test_a_helper_that_hangs_is_killed_and_replaced(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch(client, tmp_path) == b"hello"
    # Of this helper alone: a busy machine may need long to start the next one.
    monkeypatch.setattr(client._link, "_patience", 2.0)
    hung = client._link._process
    os.kill(hung.pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert fetch(client, tmp_path) == b"hello"
    assert 1.0 < time.monotonic() - begin < 30
    assert hung.returncode == -signal.SIGKILL


def test_a_helper_that_keeps_dying_is_given_up(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = partial(subprocess.Popen, [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(helper_module.child, "start", lambda *_, **__: dying())
    with pytest.raises(SourceUnavailable, match=r"ended.*3 times"):
        fetch(client, tmp_path)


def test_a_place_that_cannot_be_opened_says_why() -> None:
    client = Client(address_of("s3://b/x", {"nonsense": 1}).location, Pace())
    with pytest.raises(ConfigError, match=r"nonsense.*check the address"):
        client.head(["x"])


def test_it_is_opened_when_first_used_and_stays_here(client: Client, tmp_path: Path) -> None:
    assert client._link is None
    fetch(client, tmp_path)
    copy = pickle.loads(pickle.dumps(client))
    assert copy._link is None
    assert fetch(copy, tmp_path) == b"hello"
    assert copy._link._process.pid != client._link._process.pid
    copy.close()
    assert fetch(copy, tmp_path) == b"hello"
    copy.close()


def test_a_process_of_ours_may_do_without(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, pickle, sys\n"
        "from stoker.source.remote.client import serve_clients_here\n"
        "serve_clients_here()\n"
        "client = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print(client.head([sys.argv[2]])[0].size, type(client._link).__name__, flush=True)\n"
        "os._exit(0)\n"
    )
    assert not client_module._clients_here
    arguments = [pickle.dumps(client).hex(), f"{tmp_path}/x"[1:]]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["5", "_Here"]


def open_files(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def test_descriptors_do_not_add_up(client: Client, tmp_path: Path) -> None:
    fetch(client, tmp_path)
    before = open_files("/proc/self/fd")
    helper = client._link._process.pid
    theirs = open_files(f"/proc/{helper}/fd")
    for _ in range(50):
        fetch(client, tmp_path)
    assert open_files("/proc/self/fd") <= before  # fewer: what other tests left has gone
    assert abs(open_files(f"/proc/{helper}/fd") - theirs) <= 4


def held(pid: int) -> list[str]:
    """Return the sockets and the memory for what is fetched that a process has open."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(fd.readlink()))
    return [name for name in found if name.startswith("socket:") or "fetched" in name]


@pytest.mark.parametrize("spare", [0, 1])
def test_a_helper_without_descriptors_is_replaced(
    client: Client, tmp_path: Path, spare: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert fetch(client, tmp_path) == b"hello"
    pid = client._link._process.pid  # type: ignore[union-attr]
    deadline = time.monotonic() + 30
    while len(left := held(pid)) > 1:  # the control socket; what the call had is closed later
        assert time.monotonic() < deadline, left
    taken = {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    free = [number for number in range(1000) if number not in taken]
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare], hard))
    assert fetch(client, tmp_path) == b"hello"
    assert "starting it again" in caplog.text

"""RateLimit: one queue for all processes of the user, whatever happens to them."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import warm

from stoker.errors import ConfigError, UntrustedPath
from stoker.source.pace import RateLimit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    yield tmp_path


def test_requests_and_bytes_are_both_limited(folder: Path) -> None:
    limit = RateLimit("a", requests=100, num_bytes=1000)
    assert max(limit.take(1) for _ in range(50)) == pytest.approx(0.45, abs=0.1)
    assert limit.take(2000) == pytest.approx(2.0, abs=0.2)
    assert RateLimit("b", requests=100).take(10**9) == 0.0
    assert RateLimit("c").take(10**9) == 0.0


def take(limit: RateLimit, times: int) -> None:
    for _ in range(times):
        limit.take(0)


def test_processes_share_it_by_name(folder: Path) -> None:
    limit = RateLimit("a", requests=100)
    child = warm.Process(target=take, args=(limit, 200))
    child.start()
    child.join()
    assert RateLimit("a", requests=100).take(0) > 0.5
    assert RateLimit("other", requests=100).take(0) == 0.0


def test_what_an_earlier_boot_left_behind_is_ignored(folder: Path) -> None:
    limit = RateLimit("a", requests=100)
    limit.path.write_bytes(struct.pack("=dd", time.monotonic() + 1e6, 0.0))
    assert limit.take(0) < 1
    limit.path.write_bytes(b"short")
    assert limit.take(0) < 1


def test_files_of_others_are_not_used(folder: Path) -> None:
    limit = RateLimit("a", requests=1)
    limit.path.symlink_to(folder / "elsewhere")
    with pytest.raises(UntrustedPath, match="is a link or no regular file: remove it"):
        limit.take(0)
    limit.path.unlink()
    os.mkfifo(limit.path)
    with pytest.raises(UntrustedPath, match="is no regular file: remove it"):
        limit.take(0)
    assert [path.name for path in folder.iterdir()] == [limit.path.name]


def test_impossible_limits_are_refused() -> None:
    for bad in ({"requests": 0}, {"num_bytes": -1}, {"requests": float("inf")}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            RateLimit("a", **bad)

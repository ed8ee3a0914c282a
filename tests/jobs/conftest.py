"""Tests of jobs meet nobody but each other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.pool import group_pool


@pytest.fixture(autouse=True)
def _own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep caches of these tests apart from those of jobs that run beside them."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user can enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path(name, "cache")))
        monkeypatch.setattr(group_pool, "_AGAIN", 0.02)
        yield Path(name)
        for pool in list(group_pool._LIVE):
            pool.close()

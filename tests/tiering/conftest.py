"""Sources and tiers for the tests of tiering; each test has a runtime directory of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Sockets have short addresses, pytest's folders long paths.
    path = tempfile.mkdtemp(prefix="stoker-")
    monkeypatch.setenv("STOKER_RUNTIME_DIR", path)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


def write_files(folder: Path, sizes: dict[str, int]) -> dict[str, bytes]:
    """Write files of random bytes, an hour old; return their content by name."""
    written = {}
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        written[name] = os.urandom(size)
        path.write_bytes(written[name])
        age(path)
    return written


def age(path: Path, seconds: float = 3600) -> None:
    """Let a file look as if it was changed that long ago: younger ones are not copied."""
    changed = path.stat().st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(changed, changed))

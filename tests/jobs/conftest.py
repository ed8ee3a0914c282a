"""Tests of jobs meet nobody but each other."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep caches of these tests apart from those of jobs that run beside them."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))

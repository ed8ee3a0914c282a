"""A small folder of real digits, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli.demo import write_digits


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of ten class folders with 30 images each."""
    folder = write_digits(tmp_path_factory.mktemp("digits"))
    for label in folder.iterdir():
        for path in sorted(label.iterdir())[30:]:
            path.unlink()
    return folder


@pytest.fixture(autouse=True)
def _own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep caches of these tests apart from those of jobs that run beside them."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))

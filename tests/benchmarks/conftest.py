"""Benchmarks are programs: their folder is on the path for the tests that import from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the benchmarks, whose modules can be imported and are forgotten afterwards."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield FOLDER
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and FOLDER in Path(file).parents:
            del sys.modules[name]

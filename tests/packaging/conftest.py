"""Fixtures for tests of packaging."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "packages")
    yield bench
    bench.close()

"""Fixtures for tests of packaging."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest
from bundles_bench import Bench
from support.processes import warm


@pytest.fixture(params=[False, True], ids=["looks", "is told"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path / "packages", is_told=request.param)
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def far() -> Iterator[Executor]:
    """A process for clients of object stores."""
    with ProcessPoolExecutor(1, warm) as far:
        yield far

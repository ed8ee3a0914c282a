"""Options of the whole test run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from typing import Any

import hypothesis
import pytest

# A shell starts what runs in its background with the first two ignored, nohup with the third, and
# children take that over; tests of signals want them as they are.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Tests share the processors with each other: threads that spin while they wait take them away.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example that waits for a processor is no failure.
hypothesis.settings.register_profile("stoker", deadline=None)
hypothesis.settings.load_profile("stoker")

# Once, not in each child.
multiprocessing.set_forkserver_preload(
    ["torch.distributed", "stoker.pytorch", "hypothesis.strategies", "numpy.random", "pytest"]
)

# The tests of each of these go to one worker, one after another: fleets of processes that take all
# processors, and files whose tests have something in common that takes long to make.
_TOGETHER = (
    "tests/survival/test_",
    "tests/cluster/test_elastic.py",
    "tests/sim/test_fitted.py",
    "tests/sim/test_played.py",
)

_places = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out single tests, and those that belong together as one, the largest of these first."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((first for first in _TOGETHER if nodeid.startswith(first)), nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses its own folder
def pytest_configure(config: pytest.Config) -> None:
    """Give this run, and each worker of a parallel one, its own caches, listings and files."""
    # Short, because the path of a Unix socket has at most 107 bytes.
    config.stash[_places] = base = tempfile.mkdtemp(prefix="stoker-t")
    if hasattr(config, "workerinput"):
        config.option.basetemp = f"{base}/t"
    os.environ.pop("STOKER_RUNTIME_DIR", None)
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        os.environ[name] = f"{base}/{name[4:7].lower()}"
        os.mkdir(os.environ[name], 0o700)  # noqa: PTH102


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove them."""
    shutil.rmtree(config.stash[_places], ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take what stays to the end, thousands of tests and torch, out of the collector's sight."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="make each of the survival tests run at least this long",
    )


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> float:
    """Seconds that a survival test shall last at least; 0 unless --soak was given."""
    return float(request.config.getoption("--soak"))

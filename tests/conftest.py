"""Options of the whole test run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support import exact
from support.memory import settle
from support.servers import bucket, moto  # noqa: F401  (fixtures: one server for all folders)

# A shell starts what runs in its background with the first two ignored, nohup with the third, and
# children take that over; tests of signals want them as they are.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Tests share the processors with each other: threads that spin while they wait take them away. The
# first is for what keeps to it, the second for programs that choose a number of threads themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# An example that waits for a processor is no failure. The same examples each time, so that a change
# is judged by what it changed; `--hypothesis-profile=random` draws others, as each night does.
hypothesis.settings.register_profile("stoker", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("stoker")

# What a program gets that says nothing; of those that do, each test names its own.
if sys.version_info >= (3, 14):
    multiprocessing.set_start_method("fork")

# Once, not in each child. The last, found from the root of the tree, makes forks cheap.
multiprocessing.set_forkserver_preload(
    [
        *("torch.distributed", "stoker.pytorch", "hypothesis.strategies", "numpy.random", "pytest"),
        "tests.support.settled",
    ]
)

# Files that take long, by the beginning of their names: they are begun first. The tests of a file
# go to one worker, one after another, so that what they import and start is not needed in each; so
# do all those of one prefix, fleets of processes that take all processors.
_LONG = (
    "tests/survival/test_",
    "tests/source/test_objects.py",
    "tests/pytorch/test_once_property.py",
    "tests/cluster/test_cut_off.py",
    "tests/tiering/test_run.py",
    "tests/cli/test_demo.py",
    "tests/tiering/test_examples.py",
    "tests/frameworks/test_examples.py",
    "tests/test_tutorials.py",
    "tests/survival/feeding/test_scripts.py",
    "tests/test_readme.py",
    "tests/frameworks/test_ported.py",
    "tests/sampler/test_unbiased.py",
    "tests/store/test_registry.py",
    "tests/pytorch/test_resume.py",
    "tests/pytorch/test_bad_input_live.py",
    "tests/shim/test_posix.py",
    "tests/source/test_objects_listing.py",
    "tests/prefetch/test_crew.py",
    "tests/pytorch/test_integrations.py",
    "tests/shim/test_python.py",
    "tests/pytorch/test_resume_scores.py",
    "tests/pytorch/test_torch_session.py",
    "tests/pytorch/test_image_transforms.py",
    "tests/pytorch/test_resume_property.py",
    "tests/test_notebook.py",
    "tests/tiering/test_docs.py",
    "tests/test_site.py",
)

# Files whose tests look at all modules of the source, which are parsed once for them.
_PARSING = {
    "tests/cluster/test_clocks.py",
    "tests/node/test_child.py",
    "tests/test_architecture.py",
    "tests/test_declared_members.py",
    "tests/test_docstrings.py",
    "tests/test_import_ladder.py",
    "tests/test_no_unpickling.py",
}


def _scope(nodeid: str) -> str:
    """Return what the test belongs to: its file, or what several files are."""
    file = nodeid.partition("::")[0]
    if file in _PARSING:
        return "parsing"
    return next((long for long in _LONG if file.startswith(long)), file)


_places = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out the tests file by file, those that take long first."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False  # in the order below, not by how many tests a file has
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that take long first; have reports tell what their tests show."""
    turns = {scope: turn for turn, scope in enumerate(_LONG)}
    items.sort(key=lambda item: turns.get(_scope(item.nodeid), len(_LONG)))
    exact.tell(items)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses its own folder
def pytest_configure(config: pytest.Config) -> None:
    """Give this run, and each worker of a parallel one, its own caches, listings and files."""
    # Short, because the path of a Unix socket has at most 107 bytes.
    config.stash[_places] = base = tempfile.mkdtemp(prefix="stoker-t")
    if hasattr(config, "workerinput"):
        config.option.basetemp = f"{base}/t"
    elif page := config.getoption("--supported"):
        config.pluginmanager.register(exact.Recorder(page.absolute()))
    os.environ.pop("STOKER_RUNTIME_DIR", None)
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        os.environ[name] = f"{base}/{name[4:7].lower()}"
        os.mkdir(os.environ[name], 0o700)  # noqa: PTH102


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove them."""
    shutil.rmtree(config.stash[_places], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: next to nothing of what is imported is any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Make forks cheap of a process that holds thousands of tests and torch."""
    settle()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="make each of the survival tests run at least this long",
    )
    help = "write the tables of this page by what marked tests show; with -m exact"
    parser.addoption("--supported", metavar="PAGE", type=Path, help=help)


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> float:
    """Seconds that a survival test shall last at least; 0 unless --soak was given."""
    return float(request.config.getoption("--soak"))

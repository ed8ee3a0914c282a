"""What torch's own tests ask of its DataLoader, asked of the Loader and of ``wrap``."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.processes import processes_of
from support.waiting import until
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.pytorch import Loader

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"


class Point(NamedTuple):
    x: torch.Tensor
    label: str


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return Point(torch.tensor([index, -index]), f"n{index}")


class Records(Points):
    def __getitem__(self, index: int) -> Any:
        return {"id": index, "half": index / 2, "text": f"n{index}", "pair": (index, b"x")}


def _pid(sample: Any) -> int:
    return os.getpid()


def _die(sample: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep(sample: Any) -> None:
    time.sleep(60)


def loader_of(dataset: Dataset[Any], **arguments: Any) -> Loader:
    return Loader(stoker.wrap(dataset, deterministic=True), **arguments)


def transformed(transform: Any, **arguments: Any) -> Loader:
    dataset = stoker.wrap(Points())
    dataset.transforms = lambda x, label: transform(x)
    return Loader(dataset, **arguments)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Points(), Records()])
def test_structures_are_collated_as_torch_does(dataset: Dataset[Any], workers: int) -> None:
    expected = list(DataLoader(dataset, batch_size=5))
    with loader_of(dataset, batch_size=5, shuffle=False, num_workers=workers) as loader:
        found = list(loader)
    assert [type(batch) for batch in found] == [type(batch) for batch in expected]
    assert repr(found) == repr(expected)


def test_persistent_workers_stay_and_others_do_not() -> None:
    for persistent in (True, False):
        with transformed(
            _pid, batch_size=4, num_workers=2, persistent_workers=persistent
        ) as loader:
            first, second = ({int(p) for b in loader for p in b} for _ in range(2))
        assert len(first) == 2 and os.getpid() not in first
        assert (first == second) is persistent


def test_a_killed_worker_is_an_error() -> None:
    with (
        transformed(_die, batch_size=4, num_workers=1) as loader,
        pytest.raises(RuntimeError, match="worker"),
    ):
        list(loader)


def test_timeout() -> None:
    with (
        transformed(_sleep, batch_size=4, num_workers=1, timeout=1) as loader,
        pytest.raises(RuntimeError, match="timed out"),
    ):
        list(loader)


def test_a_deleted_iterator_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    with transformed(_pid, batch_size=4, num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        del iterator
    until(lambda: not set(multiprocessing.active_children()) - before)


class ByBatches(Points):
    """Gives many samples at once, as torch's fetcher asks for where it can."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        raise AssertionError("not called")


def test_samples_of_a_wrapped_data_set_are_asked_for_one_by_one() -> None:
    with loader_of(ByBatches(), batch_size=8, shuffle=False, num_workers=1) as loader:
        assert [len(batch.label) for batch in loader] == [8, 8, 8]


def test_loaders_within_loaders() -> None:
    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": False, "num_workers": 1}
    with loader_of(Points(), **arguments) as outer, loader_of(Records(), **arguments) as inner:
        found = [(a.label[0], b["id"][0].item()) for a in outer for b in inner]
    assert found == [(f"n{a}", b) for a in (0, 8, 16) for b in (0, 8, 16)]


def _load(workers: int, answers: Any) -> None:
    try:
        with loader_of(Points(), batch_size=8, num_workers=workers) as loader:
            answers.put(sum(len(batch.label) for batch in loader))
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")


def test_a_daemonic_process_loads_without_workers() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    for workers, told in ((0, "24"), (1, "daemonic processes are not allowed to have children")):
        process = context.Process(target=_load, args=(workers, answers), daemon=True)
        process.start()
        assert told in str(answers.get(timeout=60))
        process.join(60)
        assert process.exitcode == 0


INTERRUPTED = """
import multiprocessing, os, signal, time, torch, stoker

multiprocessing.set_start_method("fork")

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index

loader = stoker.Loader(stoker.wrap(Points(), sample_bytes=8), batch_size=2, num_workers=2)
batches = iter(loader)
next(batches)
os.kill(0, signal.SIGINT)  # the whole group, as a terminal does
for batch in batches:
    time.sleep(0.01)
"""


def test_an_interrupt_from_the_keyboard_ends_all_processes(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    environment = {**os.environ, "STOKER_RUNTIME_DIR": str(runtime)}
    job = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _, told = job.communicate(timeout=120)
    assert job.returncode in (1, -signal.SIGINT) and "KeyboardInterrupt" in told

    def is_over() -> bool:
        try:
            os.killpg(job.pid, 0)
        except ProcessLookupError:
            return True
        return False

    until(is_over)
    until(lambda: not processes_of("stoker.prefetch", runtime))


def test_each_row_of_the_page_names_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test is named: {row}"
        for path, function in named:
            tree = ast.parse((ROOT / path).read_text())
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in names, f"{path} has no {function}"

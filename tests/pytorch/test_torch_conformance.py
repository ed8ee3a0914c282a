"""What torch's own tests ask of its DataLoader, asked of the Loader and of ``wrap``."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
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

"""The fair trial: its budget, intervals and controls are right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")


def test_all_contestants_have_the_same_budget() -> None:
    from trial.contestants import BUDGET, CONTESTANTS, made

    for one in CONTESTANTS.values():
        assert len(one.grid) == (0 if one.like else BUDGET)
        for setting in one.grid:
            made(one, setting, 1_000, 1_000_000, 64)


def test_an_interval_of_differences_is_that_of_student() -> None:
    from trial.intervals import of_mean, of_ratio

    found = of_mean([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.high - found.mean == pytest.approx(4.3027 / np.sqrt(3), rel=1e-4)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    assert np.isnan(of_mean([1.0]).low)
    assert of_ratio([2.0, 2.0]) == (2, 2, 2)


def test_a_target_that_is_not_reached_counts_as_no_speed() -> None:
    from trial.tables import Judged

    def run(name: str, accuracy: list[float], seconds: float) -> dict[str, Any]:
        told = {"name": name, "seed": 0, "setting": [0.1, None], "accuracy": accuracy}
        return told | {"seconds": [seconds] * len(accuracy)}

    default = run("default", [0.3, 0.5], 2.0)
    twice = run("quiver", [0.5, 0.5], 2.0)
    never = run("shade", [0.3, 0.492], 1.0)
    judged = Judged({"about": {}, "judged": [default, twice, never]})
    assert judged.speeds("quiver", 0.0) == [2.0]
    assert judged.speeds("shade", 0.0) == [0.0]
    assert judged.speeds("shade", 1.0) == [2.0]


def test_a_control_trains_until_as_much_is_spent() -> None:
    from fair_trial import Trial

    trial = Trial(Path(), samples=100, epochs=6, seeds=range(1), names=())
    uniform = [{"fetched": 100.0, "seconds": 1.0}] + 5 * [{"fetched": 80.0, "seconds": 0.8}]
    of = 6 * [{"fetched": 50.0, "seconds": 0.3, "accesses": 80.0}]
    assert trial._length("reads", of, uniform) == 4  # 300 of 340
    assert trial._length("seconds", of, uniform) == 2  # 1.8 of 1.8
    assert trial._length("visits", of, uniform) == 8  # 7.5, rounded


def test_results_are_made_by_several_processes_each_once(tmp_path: Path) -> None:
    from tasks import Task, run_missing

    def made(name: str) -> dict[str, Any]:
        with (tmp_path / "log").open("a") as log:
            log.write(f"{name} {os.getpid()}\n")
        return {"name": name}

    paths = [tmp_path / f"{name}.json" for name in "abcd"]
    tasks = [Task(path, (), lambda name=path.stem: made(name)) for path in paths]
    run_missing(tasks, 1, at_a_time=2)
    assert [json.loads(path.read_text()) for path in paths] == [{"name": name} for name in "abcd"]
    names, pids = zip(*map(str.split, (tmp_path / "log").read_text().splitlines()), strict=True)
    assert sorted(names) == list("abcd") and str(os.getpid()) not in pids


def test_a_process_that_fails_to_make_results_is_told(tmp_path: Path) -> None:
    from tasks import Task, run_missing

    def fails() -> dict[str, Any]:
        raise ValueError

    tasks = [Task(tmp_path / "a.json", (), fails)]
    with pytest.raises(RuntimeError, match="a process that makes results failed"):
        run_missing(tasks, 1, at_a_time=2)

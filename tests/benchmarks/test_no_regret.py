"""The no-regret map runs, resumes and draws, on one tiny cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CELL = "page-cache/2KB/0/none"


def test_a_cell_is_measured_once_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    arguments = ["--smoke", "--rounds=1", "--cells", CELL, f"--output={tmp_path}"]
    monkeypatch.setattr("sys.argv", [str(FOLDER / "no_regret.py"), *arguments])
    from no_regret import main

    main()
    assert CELL in capsys.readouterr().out
    rounds = tmp_path / "rounds.jsonl"
    before = rounds.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    assert {line["who"] for line in lines} == {"torch", "stoker"}
    assert all(len(line["epoch_s"]) == len(line["epoch_cpu_s"]) == 3 for line in lines)
    assert all(line["cpu_s"] > 0 for line in lines)
    main()
    assert rounds.read_text() == before
    assert (tmp_path / "no_regret.svg").exists()


def test_the_design_has_every_storage_size_worker_and_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from no_regret import COMPUTE, SIZES, STORAGES, WORKERS, design

    cells = design()
    assert len({str(cell) for cell in cells}) == len(cells) == 40
    for values, name in (
        (STORAGES, "storage"),
        (SIZES, "size"),
        (WORKERS, "workers"),
        (COMPUTE, "compute"),
    ):
        assert {getattr(cell, name) for cell in cells} == set(values)


def test_a_part_of_the_cells_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from no_regret import SIZES, STORAGES, WORKERS
    from no_regret_map import draw

    figures = {"epoch_s": [2.0, 1.0, 1.0], "epoch_cpu_s": [1.0, 0.5, 0.5], "cpu_s": 2.0}
    lines = [
        {"cell": cell, "round": number, "who": who, **figures}
        for cell in ("http/110KB/2/none", "page-cache/2KB/0/none")
        for number in range(2)
        for who in ("torch", "stoker")
    ]
    lines.append({"cell": "disk/2KB/2/none", "round": 0, "who": "torch", **figures})  # interrupted
    drawn = tmp_path / "no_regret.svg"
    draw(lines, drawn, list(STORAGES), list(SIZES), list(WORKERS))
    assert drawn.stat().st_size > 10_000


def test_a_cell_is_bound_by_storage_where_training_waits_for_half_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from no_regret_map import ALONE, table, waiting

    cells = {"http-60/2KB/0/balanced": 2.0, "http-60/2KB/4/balanced": 1.1, "disk/2KB/0/none": 1.0}
    lines = [
        {
            "cell": cell,
            "round": 0,
            "who": who,
            "epoch_s": [5.0, taken * factor, taken * factor],
            "epoch_cpu_s": [1.0, 1.0, 1.0],
            "cpu_s": 3.0,
        }
        for cell, taken in cells.items()
        for who, factor in (("torch", 1.0), ("stoker", 0.4))
    ]
    lines += [
        {"cell": cell, "who": ALONE, "epoch_s": [9.0, 1.0, 1.0]}
        for cell in cells
        if not cell.endswith("none")
    ]
    shares = waiting(lines)
    assert [shares[cell] for cell in cells] == pytest.approx([0.5, 1 - 1 / 1.1, 1.0])
    later = [
        target for target in table(lines, smoke=False).targets if "storage-bound" in target.name
    ]
    assert [(target.name.split(",")[0], target.measured) for target in later] == [
        ("median of the 1 storage-bound cells", pytest.approx(1.0)),
        ("median of the 1 storage-bound cells", pytest.approx(0.4)),
    ]

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

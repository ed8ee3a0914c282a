"""The no-regret map runs, resumes and draws, on one tiny cell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "no_regret.py"
CELL = "page-cache/2KB/0/none"


def run(output: Path, rounds: int) -> str:
    command = [sys.executable, str(PROGRAM), "--smoke", f"--rounds={rounds}"]
    command += ["--cells", CELL, f"--output={output}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_cell_is_measured_once_and_drawn(tmp_path: Path) -> None:
    assert CELL in run(tmp_path, 1)
    rounds = tmp_path / "rounds.jsonl"
    before = rounds.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    assert {line["who"] for line in lines} == {"torch", "stoker"}
    assert all(len(line["epoch_s"]) == len(line["epoch_cpu_s"]) == 3 for line in lines)
    assert all(line["cpu_s"] > 0 for line in lines)
    run(tmp_path, 1)
    assert rounds.read_text() == before
    assert (tmp_path / "no_regret.svg").exists()

"""The frontier of plans is measured, stays below its bound, and is drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "frontier.py"


def test_no_plan_exceeds_the_bound(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--smoke", "--json", f"--plots={tmp_path}"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["rows"]
    assert {row["R"] for row in rows} == {2, 3, 4, 6, 8}
    assert all(row["hits"] <= row["bound"] + 0.2 for row in rows)
    assert all(row["hits"] > row["bound"] - 25 for row in rows)
    for name in ("ess", "coverage"):
        assert (tmp_path / f"frontier-{name}.svg").read_text().startswith("<svg")

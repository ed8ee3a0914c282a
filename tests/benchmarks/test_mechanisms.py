"""Every mechanism is replayed off and on, and those of importance to hits show that they work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("faiss", reason="faiss is not installed")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "mechanisms.py"


def test_mechanisms_are_replayed_off_and_on() -> None:
    command = [sys.executable, str(PROGRAM), "--smoke", "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["rows"]
    named = {row["mechanism"] for row in rows}
    assert len(named) == 10
    for name in named:
        states = [row["is_on"] for row in rows if row["mechanism"] == name]
        assert states[0] == "no" and set(states[1:]) == {"yes"}
    hits = {row["recipe"].strip("`"): float(row["hits"].split()[0]) for row in rows}
    assert hits["impact:parts=iip"] < hits["impact:parts=iip+lfu"] < hits["impact:parts=iis+hc"]
    others = {row["recipe"].strip("`"): float(row["substituted"].split()[0]) for row in rows}
    assert others["icache:substitute=high"] > 0

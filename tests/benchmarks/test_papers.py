"""The page of the papers: its live rows are the trial's, and what it replays runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

VERDICT = re.compile(r"(same|differs|not told apart|not redone|not here|theirs unknown)\b")


def test_the_live_rows_are_those_of_the_committed_trial(benchmarks_on_path: Path) -> None:
    from trial.tables import Judged, beside_papers

    results = benchmarks_on_path / "results"
    live = beside_papers(Judged(json.loads((results / "trial.json").read_text())))
    reports = json.loads((results / "papers.json").read_text())["reports"]
    shown = {report["title"]: report["rows"] for report in reports}
    assert shown.keys() == live.keys()
    for paper, rows in live.items():
        assert rows == shown[paper][: len(rows)], "python benchmarks/papers.py --publish benchmarks"


def test_every_figure_is_replayed_or_said_to_be_missing(benchmarks_on_path: Path) -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    command = [sys.executable, str(benchmarks_on_path / "papers.py"), "--smoke", "--json"]
    reports = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    for report in reports:
        for row in report["rows"]:
            assert bool(row["ours"]) == bool(row["kind"]), row
            assert row["theirs"] and VERDICT.match(row["verdict"]), row

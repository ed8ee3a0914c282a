"""The benchmark of resized photographs runs, tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "cache_stage.py"


def test_it_says_what_was_hit_and_how_fast_decoding_is() -> None:
    command = [sys.executable, str(PROGRAM), "--smoke", "--json"]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    about_stages, about_decoding, about_forms = (
        report["rows"] for report in json.loads(said.stdout)
    )
    stages = {row["stage"]: row for row in about_stages}
    assert list(stages) == ["encoded", "resized:288"]
    assert stages["resized:288"]["hits"] > 2 * stages["encoded"]["hits"] > 0
    assert stages["resized:288"]["MB_from_storage"] < stages["encoded"]["MB_from_storage"]
    assert len(about_decoding) == 3 and all(row["ms_of_cpu"] > 0 for row in about_decoding)
    forms = {row["form"]: row for row in about_forms}
    assert 0 < forms["resized:288"]["mean_difference"] < forms["resized:224"]["mean_difference"]
    assert "Traceback" not in said.stderr

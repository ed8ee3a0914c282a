"""The example of docs/resume.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from support.processes import run_python

DOCUMENT = Path(__file__).parents[2] / "docs" / "resume.md"


def test_the_example_runs(tmp_path: Path) -> None:
    # The two blocks before it need a model and a loader; tests/test_readme.py runs them.
    *_, example = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    run_python("-W", "error", script, folder=tmp_path).check_returncode()

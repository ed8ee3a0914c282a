"""The code of docs/write-a-policy.md works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "write-a-policy.md"


def test_the_page_runs(tmp_path: Path) -> None:
    parts = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for name, code in zip(("mine.py", "train.py", "test_mine.py"), parts, strict=True):
        (tmp_path / name).write_text(code)
    classes = parts[0][parts[0].index("@dataclass") :]
    assert len([line for line in classes.splitlines() if line.strip()]) <= 20, "twenty lines"
    subprocess.run([sys.executable, "-W", "error", "train.py"], cwd=tmp_path, check=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    subprocess.run(tests, cwd=tmp_path, check=True)

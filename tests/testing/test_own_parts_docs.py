"""The programs of docs/write-a-policy.md and docs/extend.md work as they stand."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.pages import ROOT
from support.processes import run_python

PAGES = {
    "write-a-policy.md": [("mine.py", "train.py", "test_mine.py")],
    "extend.md": [
        (f"my{part}.py", f"test_my{part}.py", f"{verb}_my{part}.py")
        for part, verb in (("source", "train"), ("sampler", "train"), ("tier", "serve"))
    ],
}


@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page, groups in PAGES.items() for n in range(len(groups))]
)
def test_a_part_is_written_tested_and_used_as_the_page_says(
    page: str, number: int, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / page).read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = [name for group in PAGES[page] for name in group]
    assert all(f"`{name}`" in text for name in names if page == "extend.md")
    written = dict(zip(names, programs, strict=True))
    for name in PAGES[page][number]:
        (tmp_path / name).write_text(written[name])
    used = next(name for name in PAGES[page][number] if name.startswith(("train", "serve")))
    tested = next(name for name in PAGES[page][number] if name.startswith("test_"))
    run_python("-W", "error", used, folder=tmp_path).check_returncode()
    # Without plugins of other libraries, which take longer to import than all else.
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", tested]
    done = run_python(*tests, folder=tmp_path, env=alone)
    assert done.returncode == 0, done.stdout


def test_the_policy_takes_twenty_lines() -> None:
    text = (ROOT / "docs" / "write-a-policy.md").read_text()
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    classes = program[program.index("@dataclass") :]
    assert len([line for line in classes.splitlines() if line.strip()]) <= 20

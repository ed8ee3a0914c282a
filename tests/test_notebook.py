"""The notebook of the first minute runs, cell by cell, and is committed without outputs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from support.pages import ROOT

NOTEBOOK = ROOT / "examples" / "first_minute.ipynb"
# What Jupyter does: all cells in one namespace, and the value of a last expression is shown.
RUNNER = """
import ast, json, sys

for number, cell in enumerate(json.load(open(sys.argv[1]))):
    tree = ast.parse(cell)
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {number}", "exec"), globals())
    if shown is not None:
        value = eval(compile(ast.Expression(shown.value), f"cell {number}", "eval"), globals())
        if value is not None:
            print("shown:", " ".join(value._repr_html_().split()))
"""


def cells(kind: str) -> list[dict[str, object]]:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_of_the_first_minute(tmp_path: Path) -> None:
    programs = ["".join(map(str, cell["source"])) for cell in cells("code")]  # type: ignore[arg-type]
    programs.insert(-1, "print('read', *(epoch.fetched for epoch in loader.epoch_stats))")
    (tmp_path / "cells.json").write_text(json.dumps(programs))
    command = [sys.executable, "-W", "error", "-c", RUNNER, str(tmp_path / "cells.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^epoch (\d): (\d+) samples", done.stdout, re.M) == [
        (str(epoch), "480") for _ in range(2) for epoch in range(3)
    ], done.stdout
    (read,) = re.findall(r"^read (.*)$", done.stdout, re.M)
    first, *later = map(int, read.split())
    assert first == 480 and all(200 <= count <= 280 for count in later), "half is cached"
    (shown,) = re.findall(r"^shown: (.*)$", done.stdout, re.M)
    assert shown.startswith("<") and "</table>" in shown


def test_it_is_committed_without_outputs_and_its_links_lead_somewhere() -> None:
    for cell in cells("code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
    text = "".join("".join(map(str, cell["source"])) for cell in cells("markdown"))  # type: ignore[arg-type]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)

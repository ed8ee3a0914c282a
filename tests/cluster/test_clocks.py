"""Clocks of nodes may disagree: what nodes agree on is made without any."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import stoker.errors

SOURCE = Path(stoker.errors.__file__).parent
AGREED = [
    *sorted((SOURCE / "cluster").glob("*.py")),
    *(SOURCE / "sampler" / name for name in ("homes.py", "local_order.py")),
    *(SOURCE / "pytorch" / name for name in ("nodes.py", "agreement.py", "distributed_sampler.py")),
]


@pytest.mark.parametrize("path", AGREED, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_nothing_that_nodes_agree_on_reads_a_clock(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {"time", "datetime"}

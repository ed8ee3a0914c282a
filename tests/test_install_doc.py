"""The page on installation names every extra of the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_newcomer_4_every_extra_is_described() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    described = re.findall(r"^\| `([\w-]+)` \| \S", page, re.M)
    assert sorted(described) == sorted(project["optional-dependencies"])

"""The page on installation names every extra; wheels are checked for what they hold."""

from __future__ import annotations

import contextlib
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from check_wheel import PARTS, PRELOAD, check_contents

ROOT = Path(__file__).parents[1]


def test_newcomer_4_every_extra_is_described() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    described = re.findall(r"^\| `([\w-]+)` \| \S", page, re.M)
    assert sorted(described) == sorted(project["optional-dependencies"])


def test_the_check_of_wheels_takes_those_for_musl(tmp_path: Path) -> None:
    names = [re.sub(r"\\(.)", r"\1", part.replace(".*", "x")) for part in PARTS]
    for platform, inside, fits in (
        ("musllinux_1_2_x86_64", names, True),
        ("manylinux_2_28_aarch64", [*names, PRELOAD], True),
        ("musllinux_1_2_x86_64", [*names, PRELOAD], False),
        ("manylinux_2_28_aarch64", names, False),
        ("linux_x86_64", [*names, PRELOAD], False),
    ):
        wheel = tmp_path / f"stoker-1-cp311-cp311-{platform}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in inside:
                archive.writestr(name, "")
        with contextlib.nullcontext() if fits else pytest.raises(AssertionError):
            check_contents(wheel)

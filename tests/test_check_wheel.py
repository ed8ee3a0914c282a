"""The check of wheels: which it takes by what they hold."""

from __future__ import annotations

import contextlib
import re
import zipfile
from pathlib import Path

import pytest
from check_wheel import PARTS, PRELOAD, check_contents


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

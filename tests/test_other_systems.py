"""Elsewhere than on Linux, building and importing say in a sentence what to do instead."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT


def test_building_for_a_mac_is_refused_in_a_sentence(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if cmake is None:
        pytest.skip("cmake is not installed")
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path), "-DCMAKE_SYSTEM_NAME=Darwin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert "Stoker runs on Linux only" in said and "a Linux container on this one" in said


def test_importing_on_a_mac_is_refused_in_a_sentence() -> None:
    code = "import sys; sys.platform = 'darwin'; import stoker"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert last.startswith("ImportError: Stoker runs on Linux only, and this is darwin")
    assert last.endswith("Use a Linux machine, or a Linux container on this one")

"""Installs a wheel where there is no compiler and no checkout, and does what README says there.

``make wheel-test`` runs it for the wheels in dist/. Torch and what else the extra ``torch`` brings
are those of the Python that runs this, unless ``--alone`` has them installed too. Without torch
there, what needs none is tried.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

from support.pages import readmes_program, run_script

MOST_BYTES = 5_000_000
PARTS = (
    r"stoker/_core\..*\.so",
    r"stoker/_images\..*\.so",
    r"stoker/py\.typed",
    r"stoker/_core\.pyi",
    r"stoker/cli/_digits\.npz",
    r"stoker-.*\.dist-info/licenses/LICENSE",
    r"stoker-.*\.dist-info/licenses/NOTICE",
)
PRELOAD = "stoker/libstoker_preload.so"
WITHOUT_TORCH = """
import numpy, stoker, sys
from stoker.source import MemorySource
source = MemorySource([bytes([n]) * 100 for n in range(60)])
cache = stoker.Cache("50%", stands_aside=False)
with stoker.Feed(source, 10, decode=lambda raw: numpy.frombuffer(raw, "u1"), cache=cache) as feed:
    for _ in range(3):
        seen = sorted(int(row[0]) for batch in feed for row in batch.data)
        assert seen == list(range(60))
    print(feed.stats.accesses, int(feed.stats.hits > 0), int("torch" in sys.modules))
"""


def main() -> None:
    """Check each wheel that is given; the first that fails ends it with its reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--alone", action="store_true", help="install torch, too")
    args = parser.parse_args()
    for wheel in args.wheels:
        check_contents(wheel)
        with tempfile.TemporaryDirectory(prefix="stoker-wheel-") as folder:
            check_use(wheel.resolve(), Path(folder), args.alone)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, works")


def check_contents(wheel: Path) -> None:
    """What must be inside is, the whole is small, and nothing is there that users do not need."""
    names = zipfile.ZipFile(wheel).namelist()
    for part in PARTS:
        assert any(re.fullmatch(part, name) for name in names), f"{part} is missing"
    musl = "musllinux_" in wheel.name
    assert (PRELOAD in names) != musl, f"{PRELOAD} replaces functions of glibc, and of no other"
    assert wheel.stat().st_size < MOST_BYTES, wheel.stat().st_size
    tops = {name.split("/")[0].split("-")[0].split(".")[0] for name in names}
    assert tops <= {"stoker"}, tops
    assert musl or "manylinux_" in wheel.name, "not repaired by auditwheel"


def check_use(wheel: Path, folder: Path, alone: bool) -> None:
    """Install it into a new environment whose PATH has nothing else, and use it as README does."""
    venv.create(folder / "venv", with_pip=True)
    bin = folder / "venv" / "bin"
    home = folder / "home"
    home.mkdir()
    keep = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    os.environ.clear()
    os.environ.update(keep, PATH=str(bin), HOME=str(home), TMPDIR=str(folder))
    python = str(bin / "python")
    pip = [python, "-m", "pip", "install", "-q", "--only-binary", ":all:"]
    subprocess.run([*pip, str(wheel)], check=True)
    assert run_script(WITHOUT_TORCH, home, python) == [180, 1, 0]
    told = subprocess.run([bin / "stoker", "ls"], capture_output=True, text=True, check=False)
    assert told.returncode == 1 and "pip install 'stoker[tui]'" in told.stderr, told
    has_torch = alone or importlib.util.find_spec("torch") is not None
    if has_torch and not alone:  # a path of modules, without the hooks of .pth files
        below = Path(python).parents[1] / "lib" / f"python{sysconfig.get_python_version()}"
        (below / "site-packages" / "below.pth").write_text(sysconfig.get_path("platlib"))
    subprocess.run([*pip, f"{wheel}[{'torch' if has_torch else 'tui'}]"], check=True)
    print(output(bin / "stoker", "--version").strip())
    where = json.loads(output(bin / "stoker", "doctor", "--json"))["core"]["path"]
    assert Path(where).is_relative_to(folder), where
    if not has_torch:
        print("without torch: the README's program and the demo are not tried")
        return
    assert run_script(readmes_program(home), home, python) == [180, 1]
    options = ("--recipes", "foresight", "--epochs", "2", "--latency", "1ms", "--json")
    runs = json.loads(output(bin / "stoker", "demo", *options, "--output", home))["runs"]
    assert [run["recipe"] for run in runs] == ["dataloader", "foresight"]
    torchs, ours = (run["epochs"][-1]["seconds"] for run in runs)
    print(f"the demo's second epoch: {torchs:.2f} s with torch's DataLoader, {ours:.2f} s here")


def output(*command: object) -> str:
    """Run it; return what it prints."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

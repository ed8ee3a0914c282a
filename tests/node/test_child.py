"""What processes of our own import, whatever lies in the folder they are started in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.modules import SOURCE, modules
from support.processes import processes_of
from support.waiting import await_true

from stoker.node import child
from stoker.node.child import Surroundings, command
from stoker.node.supervisor import Supervisor
from stoker.source.pace import Pace
from stoker.source.remote.backend import address_of
from stoker.source.remote.helper import Helper
from stoker.source.remote.request import Outage

# What the standard library's own modules are called, by which our processes begin.
PLANTED = ("logging", "random", "json", "pickle", "socket", "threading", "sitecustomize")


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder of modules that tell when they are imported, and then fail."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in PLANTED:
        ran = tmp_path / f"{name}-ran"
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise SystemExit(7)")
    return folder


def what_ran(planted: Path) -> list[str]:
    return sorted(path.name for path in planted.parent.glob("*-ran"))


@pytest.mark.parametrize("module", ["stoker.prefetch.process", "stoker.bundles.packing"])
def test_c4_a_companion_imports_nothing_from_the_current_folder(
    module: str, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(planted.parent / "run"))
    monkeypatch.chdir(planted)
    # A job of nothing: the process comes up far enough to miss the attributes of a real one.
    supervisor = Supervisor("help", module, "key", dict, lambda channel: None)
    assert await_true(lambda: processes_of(module, planted.parent) or what_ran(planted))
    supervisor.close()
    assert await_true(lambda: not processes_of(module, planted.parent))
    assert what_ran(planted) == []


def test_c4_the_process_that_reads_objects_imports_nothing_from_there(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(planted)
    place = address_of(f"file://{planted}/").location
    helper = Helper(place, Pace(), Outage())  # raises where the process does not start
    helper.close()
    assert what_ran(planted) == []


@pytest.mark.parametrize("path", ["", ":/nowhere", ".:/nowhere"])
def test_c4_stoker_run_in_a_folder_of_planted_modules(
    planted: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the console script starts it: its own folder is on the path, the current one is not."""
    source, tier = planted.parent / "source", planted.parent / "tier"
    source.mkdir()
    (source / "one").write_text("truth")
    stoker_command = [sys.executable, "-P", "-c", "from stoker.cli import main; main()", "run"]
    tiers = [f"--source={source}", f"--tier={tier}:1MiB", "--quiet", "--"]
    if path:  # it reaches the daemon only: an interpreter that is safe itself has been set up
        code = (
            f"import os; os.environ['PYTHONPATH'] = {path!r}; from stoker.cli import main; main()"
        )
        stoker_command[3] = code
    done = subprocess.run(
        [*stoker_command, *tiers, "cat", source / "one"],
        cwd=planted,
        env={**os.environ, "STOKER_RUNTIME_DIR": str(planted.parent / "run")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert what_ran(planted) == []
    assert (done.returncode, done.stdout) == (0, "truth"), done.stderr


STARTER = """
import subprocess, sys
from stoker.node import child
words = child.command(child.Surroundings.own(), "mine", "told")
found = subprocess.run(words, env=child.environment(), check=True, capture_output=True, text=True)
print(found.stdout, end="")
"""
MINE = """
import sys
def main():
    import colorsys, stoker
    print(sys.argv[1], __file__, colorsys.__file__, stoker.__file__, sep="\\n")
"""


@pytest.mark.parametrize("how", ["script", "code", "module"])
def test_what_the_parent_imports_is_found_by_the_child(how: str, tmp_path: Path) -> None:
    """Modules of the user's, beside the script or in the folder of a notebook."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "starter.py").write_text(STARTER)
    (tmp_path / "colorsys.py").write_text("raise SystemExit('the wrong one')")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    arguments, cwd = {
        "script": ([str(tmp_path / "starter.py")], elsewhere),
        "code": (["-c", STARTER], tmp_path),
        "module": (["-m", "starter"], tmp_path),
    }[how]
    # Only the child meets the module that is called as one of the standard library.
    code = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE.parent)])}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=code, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told, mine, library, package = done.stdout.splitlines()
    assert told == "told" and Path(mine) == tmp_path / "mine.py"
    assert Path(library).parent != tmp_path
    assert Path(package).parent == SOURCE


def test_numpy_starts_no_threads_in_a_process_of_ours() -> None:
    """They spin as it is imported, on each core, for longer than that takes."""
    asked = {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS"}
    base = {name: value for name, value in os.environ.items() if name not in asked}
    code = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
    told = subprocess.run(
        [sys.executable, "-c", code], env=child.environment(base), capture_output=True, check=True
    )
    assert int(told.stdout) == 1
    assert child.environment({"OPENBLAS_NUM_THREADS": "3"}) == {"OPENBLAS_NUM_THREADS": "3"}


def test_a_module_of_the_users_may_be_called_as_a_part_of_ours() -> None:
    assert str(SOURCE.parent) in command(Surroundings.own(), "any")
    assert not [
        entry for entry in command(Surroundings.own(), "any") if Path(entry).is_relative_to(SOURCE)
    ]


def test_c4_no_process_is_started_by_m_or_by_code_of_its_own() -> None:
    """Python's command line is made in one place; nowhere else is there an interpreter's path."""
    found = []
    for module in modules():
        if module.path.name == "child.py" or "testing" in module.name.split("/"):
            continue
        for node in module.nodes:
            is_interpreter = isinstance(node, ast.Attribute) and node.attr in (
                "executable",
                "get_executable",
            )
            is_list = isinstance(node, ast.List) and any(
                isinstance(each, ast.Constant) and each.value in ("-m", "-c") for each in node.elts
            )
            if is_interpreter or is_list:
                found.append(f"{module.name}:{node.lineno}")
    assert found == []

"""Tutorials: their programs run as they stand, and print what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.pages import ROOT
from support.processes import run_python
from support.redis_servers import needs_server
from support.servers import free_port

TUTORIALS = ROOT / "docs" / "tutorials"
IN_PYTHON = (
    "images-on-s3",
    "nfs-and-nvme",
    "text-from-parquet",
    "your-own-policy",
    "reading-a-report",
)
CLI = "from stoker.cli import main; main()"
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_BY_THE_CLOCK = re.compile(r"waits \d+%")


def of_kind(page: str, language: str) -> list[str]:
    """The code blocks of a tutorial in a language."""
    text = (TUTORIALS / f"{page}.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.M)
    return [code for kind, code in blocks if kind == language]


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run a command of the page; return what it prints, which must be no warning."""
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = run_python("-W", "error", *command, folder=folder, env=told)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def assert_alike(page: str, printed: str) -> None:
    """The same lines, but for figures a little away, and shares of time."""
    expected = _BY_THE_CLOCK.sub("waits", "".join(of_kind(page, "text")))
    printed = _BY_THE_CLOCK.sub("waits", printed)
    assert _NUMBER.sub("#", " ".join(printed.split())) == _NUMBER.sub(
        "#", " ".join(expected.split())
    )
    for found, told in zip(_NUMBER.findall(printed), _NUMBER.findall(expected), strict=True):
        have, want = float(found.replace(",", "")), float(told.replace(",", ""))
        assert abs(have - want) <= max(3, 0.2 * want), (found, told)


def test_all_tutorials_are_run_here() -> None:
    shell = {"several-jobs", "several-nodes"}
    assert {path.stem for path in TUTORIALS.glob("*.md")} == {*IN_PYTHON} | shell


@pytest.mark.parametrize("page", IN_PYTHON)
def test_programs_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("\n".join(of_kind(page, "python")))
    assert_alike(page, run(tmp_path, "program.py"))


def test_several_jobs(tmp_path: Path) -> None:
    (program,) = of_kind("several-jobs", "python")
    (tmp_path / "search.py").write_text(program)
    make, alone, together = of_kind("several-jobs", "")[0].splitlines()
    run(tmp_path, *shlex.split(make)[1:])
    reads = [int(run(tmp_path, *shlex.split(alone)[1:]).split()[2])]
    jobs = [shlex.split(job)[1:] for job in together.split(" & ")[:-1]]
    running = [
        subprocess.Popen([sys.executable, *job], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for job in jobs
    ]
    printed = [job.communicate(timeout=120)[0] for job in running]
    reads += [int(line.split()[2]) for line in printed]
    assert reads[0] == pytest.approx(6800, rel=0.02)
    assert sum(reads[1:]) < 0.95 * 3 * reads[0], "they share what they read"


@contextmanager
def a_pool(folder: Path) -> Iterator[str]:
    """The address of the pool that the page starts, with a port and a folder of the test's own."""
    (command,) = re.findall(r"^stoker (pool up .*)", "\n".join(of_kind("several-nodes", "")), re.M)
    own = ["--dir", str(folder / "pool")]
    port = ["--port", str(free_port())]
    told = run(folder, "-c", CLI, *shlex.split(command), *own, *port)
    try:
        (address,) = re.findall(r"pool='(.*)'", told)
        yield address
    finally:
        run(folder, "-c", CLI, "pool", "down", *own)


@needs_server
def test_several_nodes(tmp_path: Path) -> None:
    (program,) = of_kind("several-nodes", "python")
    (tmp_path / "train.py").write_text(program)
    make, *nodes = of_kind("several-nodes", "")[2].splitlines()
    run(tmp_path, *shlex.split(make)[1:])
    printed = ""
    with a_pool(tmp_path) as pool:
        for number, node in enumerate(nodes):
            runtime = tmp_path / f"node{number}"
            runtime.mkdir(mode=0o700)
            command = shlex.split(node.replace("$POOL", pool))[1:]
            printed += run(tmp_path, *command, STOKER_RUNTIME_DIR=str(runtime))
    assert_alike("several-nodes", printed)

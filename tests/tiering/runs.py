"""Starts `stoker run` as a user does, and reads its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOKER = [sys.executable, "-c", "from stoker.cli import main; main()", "run"]


@dataclass(frozen=True)
class Setup:
    """A source and tiers, as command-line options."""

    source: Path
    tiers: tuple[tuple[Path, int], ...]
    options: tuple[str, ...] = ()

    def command(self, *program: str | Path) -> list[str]:
        tiers = [f"--tier={path}:{quota}" for path, quota in self.tiers]
        return [*STOKER, f"--source={self.source}", *tiers, *self.options, "--", *map(str, program)]

    def start(self, *program: str | Path, **options: Any) -> subprocess.Popen[str]:
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen(self.command(*program), **given)

    def run(self, *program: str | Path, **options: Any) -> Done:
        process = self.start(*program, **options)
        out, err = process.communicate(timeout=200)
        return Done(process.returncode, out, err)


@dataclass(frozen=True)
class Done:
    """What came out of a run."""

    status: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """The report that --json printed; the rest of standard error stands before it."""
        found: dict[str, Any] = json.loads(self.err[self.err.index("{\n") :])
        return found


def direct(*program: str | Path, **options: Any) -> str:
    """What the program prints without us."""
    done = subprocess.run(
        [*map(str, program)], capture_output=True, text=True, check=True, timeout=200, **options
    )
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}

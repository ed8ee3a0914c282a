"""Processes that tests start, and those that Stoker starts at the side of training."""

from __future__ import annotations

import gc
import os
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any


class _Process(ForkServerProcess):
    """Has the environment of the process that starts it; the server's is of an earlier test."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        gc.freeze()  # of torch there are 300,000 objects, which each collection would go through
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Warm(ForkServerContext):
    Process = _Process


warm = _Warm()
"""Starts processes that share nothing with this one, as "spawn" does, but have imported already
what takes longer than most tests: see ``set_forkserver_preload`` in conftest.py."""


def processes_of(module: str, runtime: Path) -> list[int]:
    """The processes that run ``module`` and use a runtime directory below ``runtime``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # By whole arguments: a pgrep for the same name, of another rank's, is none of them.
            is_one = module.encode() in (process / "cmdline").read_bytes().split(b"\0")
            if is_one and str(runtime).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found

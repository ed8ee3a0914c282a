"""What tests of processes that Stoker starts at the side of training have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def await_true(test: Callable[[], object], patience: float = 20.0) -> bool:
    """Whether ``test()`` becomes true within ``patience`` seconds."""
    end = time.monotonic() + patience
    while not test():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


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

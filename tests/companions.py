"""What tests of processes that Stoker starts at the side of training have in common."""

from __future__ import annotations

import subprocess
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
    listed = subprocess.run(["pgrep", "-f", module], capture_output=True, text=True)
    found = []
    for pid in map(int, listed.stdout.split()):
        try:
            if str(runtime).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found

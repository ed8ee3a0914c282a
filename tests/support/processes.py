"""The processes that Stoker starts at the side of training."""

from __future__ import annotations

from pathlib import Path


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

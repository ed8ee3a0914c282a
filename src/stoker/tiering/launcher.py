"""Runs a command on tiers: daemon, preloaded shim, report."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker import _core
from stoker.errors import ConfigError
from stoker.tiering.command import run_command
from stoker.tiering.config import Config
from stoker.tiering.membership import Membership

_LIBRARY = "libstoker_preload.so"
_SYMBOLS = "preload.md"


def run(
    config: Config,
    command: Sequence[str],
    report_file: Path | None = None,
    done: Callable[[dict[str, Any]], object] = lambda report: None,
) -> int:
    """Run the command on the tiers; return its exit status, 128 + n when signal n ended it.

    ``report_file`` is written every second, whole; ``done`` gets the report at the end. Raises
    :class:`~stoker.errors.ConfigError` where the configuration is refused or the command cannot
    be started (:class:`~stoker.tiering.command.NotStarted`).
    """
    library = shim_file(_LIBRARY)
    with Membership(config) as membership:
        # The command's own programs are to find the daemon, this process is not: hence the copy.
        environment = preloaded(os.environ, library) | membership.environment()

        def write() -> None:
            if report_file is not None:
                _write(report_file, membership.report())

        def write_if_possible() -> None:  # a full disk must not end the command
            with contextlib.suppress(OSError):
                write()

        try:
            write()
        except OSError as error:
            raise ConfigError(
                f"--report {str(report_file)!r} cannot be written: {error}"
            ) from error
        status = run_command(command, environment, write_if_possible)
        write_if_possible()
        done(membership.report())
    return status


def explain() -> str:
    """Return what is intercepted and what cannot be seen, as Markdown."""
    return shim_file(_SYMBOLS).read_text(encoding="utf-8")


def shim_file(name: str) -> Path:
    """Return a file that was built beside the core; ConfigError where it was not."""
    path = Path(_core.__file__).with_name(name)
    if not path.is_file():
        raise ConfigError(f"{path} is missing: this build of Stoker has no preload library")
    return path


def preloaded(environment: Mapping[str, str], library: Path) -> dict[str, str]:
    """Return the environment with ``library`` preloaded before all others."""
    before = environment.get("LD_PRELOAD", "")
    if any(character in str(library) for character in ": "):
        raise ConfigError(f"{library} cannot be preloaded: its path has a space or a colon")
    return {**environment, "LD_PRELOAD": f"{library} {before}".strip()}


def _write(path: Path, report: dict[str, Any]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(report, indent=1) + "\n")
    fresh.replace(path)

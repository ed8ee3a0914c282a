"""Runs a command on tiers: daemon, preloaded shim, report."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from stoker import _core
from stoker.errors import CapacityError, ConfigError, SegmentError
from stoker.tiering.command import become, run_command
from stoker.tiering.config import SHORTAGES, Config
from stoker.tiering.membership import Membership

_LIBRARY = "libstoker_preload.so"
_SYMBOLS = "preload.md"


def run(
    config: Config,
    command: Sequence[str],
    report_file: Path | None = None,
    done: Callable[[dict[str, Any]], object] = lambda report: None,
    note: Callable[[str], object] = lambda text: None,
) -> int:
    """Run the command on the tiers; return its exit status, 128 + n when signal n ended it.

    ``report_file`` is written every second, whole; ``done`` gets the report at the end, ``note``
    messages for the user, once each. Without space, memory or descriptors for tiers,
    ``note`` says so and the command runs without them. Raises
    :class:`~stoker.errors.ConfigError` where the configuration is invalid or the command cannot
    be started (:class:`~stoker.tiering.command.NotStarted`).
    """

    def run_plainly(error: Exception) -> NoReturn:
        note(f"programs read {config.spelling} without copies: {error}")
        become(command)

    library = shim_file(_LIBRARY)
    try:
        membership = Membership(config)
    except (SegmentError, OSError) as error:
        run_plainly(error)
    with membership:
        # The command's own programs are to find the daemon, this process is not: hence the copy.
        environment = preloaded(os.environ, library) | membership.environment()

        def write() -> None:
            if report_file is not None:
                _write(report_file, membership.report())

        said = False

        def tick() -> None:
            nonlocal said
            if not said and membership.elsewhere():
                said = True
                note(
                    f"{config.spelling} leads to another directory than at the start (a link, a "
                    "rename or a mount): programs read there what is there, without copies"
                )
            with contextlib.suppress(OSError):  # a full disk must not end the command
                write()

        try:
            write()
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise ConfigError(
                    f"--report {str(report_file)!r} cannot be written: {error}"
                ) from error
        try:
            status = run_command(command, environment, tick)
        except CapacityError as error:  # the command has not begun
            run_plainly(error)
        try:
            tick()
            done(membership.report())
        except Exception as error:  # whatever it is, the command's status is what counts
            with contextlib.suppress(Exception):
                note(f"there is no report: {error}")
    return status


def explain() -> str:
    """Return what is intercepted and what cannot be seen, as Markdown."""
    return shim_file(_SYMBOLS).read_text(encoding="utf-8")


def shim_file(name: str) -> Path:
    """Return a file that was built beside the core; ConfigError if it is missing."""
    path = Path(_core.__file__).with_name(name)
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: this build of Stoker has no preload library, which needs glibc on "
            "x86-64 or aarch64; build it there, or read through Stoker's data sets"
        )
    return path


def preloaded(environment: Mapping[str, str], library: Path) -> dict[str, str]:
    """Return the environment with ``library`` preloaded before all others."""
    before = environment.get("LD_PRELOAD", "")
    if any(character in str(library) for character in ": "):
        raise ConfigError(f"{library} cannot be preloaded: its path has a space or a colon")
    return {**environment, "LD_PRELOAD": f"{library} {before}".strip()}


def _write(path: Path, report: dict[str, Any]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(fresh, flags, 0o666), "w") as file:
        file.write(json.dumps(report, indent=1) + "\n")
    fresh.replace(path)

"""Runs a command on tiers: daemon, preloaded shim, report."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from stoker._core import __file__ as _core_file
from stoker.errors import CapacityError, ConfigError, SegmentError
from stoker.tiering.config import SHORTAGES, Config
from stoker.tiering.membership import Membership

_LIBRARY = "libstoker_preload.so"
_SYMBOLS = "preload.md"
_FORWARDED = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGWINCH,
    }
)
_AWAITED = _FORWARDED | {signal.SIGCHLD}
_FROM_KERNEL = 0x80  # si_code of what a terminal sends, to every process of the foreground group


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
    be started (:class:`~stoker.tiering.launcher.NotStarted`).
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
    path = Path(_core_file).with_name(name)
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


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    tick: Callable[[], object] = lambda: None,
    every: float = 1.0,
) -> int:
    """Run the command to its end; return its exit status, or 128 + n when signal n ended it.

    Signals sent to this process are passed on; those that a terminal sends reach the command by
    themselves. The command inherits descriptors, signal mask and ignored signals as they were.
    ``tick`` is called about every ``every`` seconds meanwhile. Call it from the main thread of a
    process without other threads. Raises :class:`NotStarted` if the command cannot be started, and
    :class:`~stoker.errors.CapacityError` if there is no descriptor or memory for that.
    """
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, no wait works
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        return _await(_start_command(command, environment, mask), tick, every)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, previous or signal.SIG_DFL)


def become(command: Sequence[str]) -> NoReturn:
    """Be the command from now on, with the environment as it is; takes no descriptor.

    Raises :class:`NotStarted` if it cannot be started.
    """
    try:
        _exec(command, os.environ, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    except OSError as error:
        raise _not_started(command, error.errno or errno.EIO) from error


class NotStarted(ConfigError):
    """The command cannot be started; ``status`` is what a shell returns then."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _start_command(
    command: Sequence[str], environment: Mapping[str, str], mask: set[signal.Signals | int]
) -> int:
    try:
        told, tell = os.pipe()  # closed by exec: then nothing is told
        # A fork ends the threads of NumPy's BLAS here (it starts new ones when it needs them), and
        # so no thread is left that has not blocked the signals.
        pid = os.fork()
    except OSError as error:
        raise CapacityError(f"no process can be started for the command: {error}") from error
    if pid == 0:
        _become(command, environment, mask, tell)
    os.close(tell)
    try:
        failure = os.read(told, 16)
    finally:
        os.close(told)
    if not failure:
        return pid
    os.waitpid(pid, 0)
    raise _not_started(command, int(failure))


def _not_started(command: Sequence[str], number: int) -> NotStarted:
    if number == errno.ENOENT:
        return NotStarted(f"{command[0]}: command not found", 127)
    return NotStarted(f"{command[0]} cannot be started: {os.strerror(number)}", 126)


def _become(
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: set[signal.Signals | int],
    tell: int,
) -> NoReturn:
    try:
        _exec(command, environment, mask)
    except OSError as error:
        os.write(tell, b"%d" % (error.errno or errno.EIO))
    finally:
        os._exit(127)


def _exec(command: Sequence[str], environment: Mapping[str, str], mask: Iterable[int]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores for itself
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.execvpe(command[0], list(command), environment)


def _await(pid: int, tick: Callable[[], object], every: float) -> int:
    due = time.monotonic() + every
    while True:
        info = signal.sigtimedwait(_AWAITED, max(0.0, due - time.monotonic()))
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code
        # Stopped and continued past the deadline, CPython returns a signal it never filled in.
        if info is None or info.si_signo not in _AWAITED:
            tick()
            due = time.monotonic() + every
        elif info.si_signo != signal.SIGCHLD and info.si_code != _FROM_KERNEL:
            os.kill(pid, info.si_signo)

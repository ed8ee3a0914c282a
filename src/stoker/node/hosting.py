"""Processes that several jobs share, started by their user's service and not by one of the jobs.

A process belongs to the control group and the session of who starts it. What a job starts dies
with it where a batch system ends all that is left of a job, and its memory is charged to that job
alone. So a job asks the service, if there is one that sees the same files, to start the process
(:func:`started_by_service`), and gives it what it needs over the connection on which it asked:
nothing that matters passes through the service, and the job may give up at any time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import select
import socket
import subprocess
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stoker._core import BUILD
from stoker.errors import ConfigError
from stoker.node import child, descriptors
from stoker.node.child import Surroundings
from stoker.node.messages import MAX_FDS, Channel, is_ours, peer
from stoker.node.runtime_dir import runtime_dir

log = logging.getLogger("stoker.node")

HOSTED = ("stoker.prefetch.process", "stoker.bundles.packing")
"""Modules of the processes that a service starts for jobs."""

STAYS = "stays"
"""Argument of a process that says when it is there, and remains the child of who started it."""

_PATIENCE = 0.25  # seconds for each answer of the service; then the job starts the process itself
_COMING_UP = 30.0  # for the process to be there from then on: as long as one that a job starts has
_MOST_STARTING = 16  # at the same time; further ones are turned away
_LISTENING = 2.0  # seconds that a client may take to ask
_MOST_BYTES = 1 << 22  # of what a process finds around it
_SPACES = ("mnt", "net", "pid", "user")
# All that decides what a program may do that is started. CapInh does so for files with inheritable
# capabilities only, and services of users have one more there than what ssh or Slurm starts.
_RIGHTS = ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")
_FILTERS = ("Seccomp", "Seccomp_filters")  # whether system calls are filtered, and by how many
_CAP_WAKE_ALARM = 1 << 35  # systemd gives it to some of a user's sessions; it opens no file
_NO_LABELS = (errno.EINVAL, errno.ENOENT)  # of a kernel that gives processes none


def host_path() -> Path:
    """Return where the service of this user listens for jobs that want a process started."""
    return runtime_dir() / "host.sock"


def has_service() -> bool:
    """Whether a service of this user may start processes for jobs here."""
    return host_path().exists()


def _build() -> str:
    return f"{BUILD['version']} {BUILD['commit']}"


# --- a job asks ---


class Started(NamedTuple):
    """A process that a service started, and that waits to be given a job."""

    channel: Channel
    """It ends when this is closed before :func:`hand_over`."""
    pid: int


def started_by_service(module: str, base: Mapping[str, str] = os.environ) -> Started | None:
    """Return a process that runs ``main()`` of ``module``, with the environment ``base``.

    This user's service started it just now. None if there is no service, or it says no or nothing:
    then the caller starts the process. That takes half a second at most, or half a minute if the
    process hangs as it comes up.
    """
    try:
        channel = Channel.connect(host_path(), _PATIENCE)
    except OSError:
        return None
    try:
        return Started(channel, _ask(channel, module, base))
    except (OSError, ValueError, LookupError, TypeError) as error:  # or it talks nonsense
        log.info("the service of this node does not start %s: %s", module, error)
        channel.close()
        return None


def _ask(channel: Channel, module: str, base: Mapping[str, str]) -> int:
    """Have the process started, and return its number."""
    around = Surroundings.told(base)
    told = json.dumps({**around._asdict(), "environment": dict(around.environment)})
    with child.memory_file(told.encode()) as file:
        channel.send({"build": _build(), "module": module}, [file])
    _await(channel, _PATIENCE)  # it is being started
    return int(_await(channel, _COMING_UP)["pid"])  # it is there


def _await(channel: Channel, seconds: float) -> dict[str, Any]:
    """Return one message, to come within so many seconds; OSError if it does not, or is a no."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    if not poll.poll(seconds * 1000):
        raise TimeoutError(f"no answer within {seconds} s")
    received = channel.receive()
    if received is None:
        raise ConnectionError("it hung up")
    if "refused" in received[0]:
        raise ConnectionError(str(received[0]["refused"]))
    return received[0]


# --- what a process is given ---


class Given(NamedTuple):
    """What a process is given, by descriptors of who holds this."""

    job: list[int]
    """As :func:`~stoker.node.child.dumped` gives it."""
    path: Path
    """Where :attr:`listener` listens."""
    listener: int
    lock: int
    """Held as long as the process lives."""


def hand_over(channel: Channel, given: Given) -> None:
    """Give a process what it waits for; OSError if it has ended, and nothing is its own then."""
    for first in range(0, len(given.job), MAX_FDS):
        channel.send({}, given.job[first : first + MAX_FDS])
    # In one packet, the last: it gets the lock with all that it needs, or never.
    channel.send({"path": str(given.path)}, [given.listener, given.lock])


def taken_over(channel: Channel) -> Given | None:
    """Return what this process was given by :func:`hand_over`; None if nothing comes."""
    job: list[int] = []
    while (received := channel.receive()) is not None:
        message, fds = received
        if "path" in message:
            listener, lock = fds
            return Given(job, Path(message["path"]), listener, lock)
        job += fds
    return None


# --- the service starts ---


class Host:
    """Starts processes for jobs of this user that see what this process sees, and reaps them.

    They are of its ``modules`` and of this build of Stoker. Each has a session of its own and
    continues when this process ends. A request is one packet, with a file of what the process finds
    around it; none waits for another. Thread-safe.
    """

    def __init__(self, modules: Collection[str] = HOSTED) -> None:
        self._modules = frozenset(modules)
        self._starting = threading.BoundedSemaphore(_MOST_STARTING)
        self._mutex = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """How many of its processes live."""
        with self._mutex:
            return self._count

    def hear(self, connection: socket.socket) -> None:
        """Serve one who has connected, in a thread that ends with the process it started."""
        if not is_ours(connection) or not self._starting.acquire(blocking=False):
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except BaseException:
            self._starting.release()
            raise

    def _serve(self, connection: socket.socket) -> None:
        with descriptors.no_fork:  # a copy would keep the job from seeing that its process has died
            descriptors.keep(connection)
        try:
            process = self._started(connection)
        finally:
            descriptors.drop(connection)
            self._starting.release()
        if process is not None:
            self._add(1)
            process.wait()
            self._add(-1)

    def _add(self, number: int) -> None:
        with self._mutex:
            self._count += number

    def _started(self, connection: socket.socket) -> subprocess.Popen[bytes] | None:
        connection.settimeout(_LISTENING)
        channel = Channel(connection)
        try:
            module, around = self._asked(channel)
            _check_sees_the_same(peer(connection).pid)
            channel.send({"starts": module})  # fails if the job has given up
            number = connection.fileno()
            return child.start(
                module, number, STAYS, fds=[number], surroundings=around, detached=True
            )
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            log.info("a job's process is not started here: %s", error)
            with contextlib.suppress(OSError):
                channel.send({"refused": str(error)[:200]})
            return None

    def _asked(self, channel: Channel) -> tuple[str, Surroundings]:
        """Return what is to be started; ConfigError if it is not for this service."""
        received = channel.receive()
        if received is None:
            raise ConnectionError("the job has gone")
        message, fds = received
        try:
            if message.get("build") != _build():
                raise ConfigError(f"the service is Stoker {_build()}, and the job is not")
            if message.get("module") not in self._modules:
                raise ConfigError(f"the service starts no {str(message.get('module'))[:80]!r}")
            if len(fds) != 1:
                raise ConfigError(f"a request comes with one file, and not {len(fds)}")
            return message["module"], _surroundings(fds[0])
        finally:
            for fd in fds:
                os.close(fd)


def _surroundings(file: int) -> Surroundings:
    """Return what a file in memory says; OSError, ValueError, KeyError or TypeError for another."""
    fcntl.fcntl(file, fcntl.F_GET_SEALS)  # other files have none; to read this one never waits
    told = json.loads(os.pread(file, _MOST_BYTES, 0))
    python, path, environment, folder, umask, limits = (told[name] for name in Surroundings._fields)
    if isinstance(path, list) and isinstance(environment, dict) and umask in range(0o1000):
        words = [python, folder, *path, *environment, *environment.values()]
        if all(isinstance(word, str) for word in words) and _are_limits(limits):
            return Surroundings(python, path, environment, folder, int(umask), limits)
    raise ConfigError("a job says nonsense of what its process finds around it")


def _are_limits(limits: Any) -> bool:
    return isinstance(limits, dict) and all(
        name in child.LIMITS
        and isinstance(limit, list)
        and len(limit) == 2
        and all(type(each) is int and each in range(-1, 1 << 63) for each in limit)
        for name, limit in limits.items()
    )


def _check_sees_the_same(pid: int) -> None:
    """Raise ConfigError unless that process reaches the files, hosts and processes that we do."""
    if not pid:
        raise ConfigError("the service cannot see the job: it is in another process namespace")
    own, theirs = Path("/proc/self"), Path(f"/proc/{pid}")
    try:
        for space in _SPACES:
            if not (own / "ns" / space).samefile(theirs / "ns" / space):
                raise ConfigError(f"the job is in another {space} namespace than the service")
        if not (own / "root").samefile(theirs / "root"):
            raise ConfigError("the job has another root directory than the service")
        if _rights(own) != _rights(theirs):
            raise ConfigError(
                "the job has other groups, capabilities or restrictions than the service"
            )
        if _label(own) != _label(theirs):
            raise ConfigError("the job is confined otherwise than the service (SELinux, AppArmor)")
    except OSError as error:
        raise ConfigError(f"the service cannot see what the job sees: {error}") from error


def _rights(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text().splitlines()
    facts = {name: value for name, _, value in (line.partition(":") for line in lines)}
    rights = {name: facts.get(name, "") for name in (*_RIGHTS, *_FILTERS)}
    for name in rights:
        if name.startswith("Cap"):
            rights[name] = f"{int(rights[name] or '0', 16) & ~_CAP_WAKE_ALARM:x}"
    return rights


def _label(process: Path) -> bytes | None:
    """Return what a security module calls the process; None where there is no such module."""
    try:
        return (process / "attr/current").read_bytes()
    except OSError as error:
        if error.errno in _NO_LABELS:
            return None
        raise

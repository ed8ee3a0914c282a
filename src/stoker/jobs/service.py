"""The service of a node: keeps caches between jobs, and says what there is."""

from __future__ import annotations

import contextlib
import grp
import json
import logging
import os
import pwd
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError, StokerError
from stoker.jobs import protocol
from stoker.jobs.holding import Holding
from stoker.jobs.metrics import exposition
from stoker.jobs.metrics_server import MetricsServer
from stoker.jobs.protocol import MAX_ANSWER, MAX_REQUEST, PATIENCE, VERSION
from stoker.jobs.survey import survey
from stoker.store import unforked
from stoker.store.handshake import SocketAddress
from stoker.store.ofd import try_lock
from stoker.store.runtime_dir import prepare_runtime_dir
from stoker.store.unforked import Descriptor

log = logging.getLogger("stoker")

_LOOK = 0.25  # seconds between two looks for new caches
_MOST_CLIENTS = 32


@dataclass(frozen=True)
class ServiceSettings:
    """What a service may do. Raises :class:`~stoker.errors.ConfigError` for what makes no sense."""

    memory: int | None = None
    """Bytes of memory that all caches of this user may have together; None: no bound."""
    disk: int | None = None
    """Bytes of disk, likewise."""
    keep: float | None = None
    """Seconds for which a cache without a job is held; None: until its memory is needed."""
    socket: Path | None = None
    """Where it listens beside the runtime directory, for members of ``group``."""
    group: str | None = None
    """Name of the group whose members may look at ``socket``, and do nothing else."""
    metrics_port: int | None = None
    """Port on 127.0.0.1 for Prometheus; 0: any that is free."""

    def __post_init__(self) -> None:
        for name in ("memory", "disk", "keep", "metrics_port"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}={value!r} is refused: give 0 or more")
        if self.metrics_port is not None and self.metrics_port > 65535:
            raise ConfigError(f"metrics_port={self.metrics_port} is no port: give 0 to 65535")
        if (self.socket is None) != (self.group is None):
            raise ConfigError(
                f"socket={self.socket} and group={self.group!r}: give both or neither, as the "
                "runtime directory admits nobody else"
            )
        if self.group is not None:
            self.group_id()

    def group_id(self) -> int:
        """Return the number of :attr:`group`; ConfigError if there is none of that name."""
        try:
            return grp.getgrnam(str(self.group)).gr_gid
        except KeyError as error:
            raise ConfigError(f"group={self.group!r} does not exist: see `getent group`") from error


class Service:
    """Holds this user's caches, and answers who asks, until :meth:`stop`. Also a context manager.

    One per runtime directory. Nothing depends on it: jobs that run go on when it ends, and one that
    comes later finds their caches. Each request is one line of JSON of bounded size that has to
    come within :data:`~stoker.jobs.protocol.PATIENCE`; the kernel says who asks, and strangers get
    no answer. Raises :class:`~stoker.errors.ConfigError` if another one runs or a socket cannot be
    had, :class:`OSError` for a runtime directory that is not safe.
    """

    def __init__(self, settings: ServiceSettings | None = None) -> None:
        self.settings = settings = settings or ServiceSettings()
        folder = prepare_runtime_dir()
        self._lock = _lock(folder / "service.lock")
        self._stopping = threading.Event()
        self._clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        self._listeners: list[tuple[socket.socket, Path]] = []
        self._threads: list[threading.Thread] = []
        self._metrics: MetricsServer | None = None
        try:
            self.holding = Holding(settings.memory, settings.disk, settings.keep)
            self._listen(protocol.service_path(), None)
            if settings.socket is not None:
                self._listen(settings.socket, settings.group_id())
            if settings.metrics_port is not None:
                self._metrics = MetricsServer(settings.metrics_port, self.metrics)
        except BaseException:
            self.close()
            raise

    @property
    def metrics_port(self) -> int | None:
        """Where metrics are to be had over HTTP."""
        return None if self._metrics is None else self._metrics.port

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        serving: list[Callable[[], None]] = [self._accepting(*each) for each in self._listeners]
        if self._metrics is not None:
            serving.append(self._metrics.run)
        self._threads = [threading.Thread(target=each, daemon=True) for each in serving]
        for thread in self._threads:
            thread.start()
        while not self._stopping.wait(_LOOK):
            try:
                self.holding.look()
            except (StokerError, OSError) as error:
                log.warning("caches cannot be looked for: %s", error)

    def stop(self) -> None:
        """Make :meth:`run` return soon; safe in a signal handler."""
        self._stopping.set()

    def metrics(self) -> str:
        """Return what Prometheus reads."""
        return exposition([asdict(cache) for cache in survey()], self.holding.limits())

    def answer(self, message: dict[str, Any], *, is_owner: bool) -> dict[str, Any]:
        """Return the answer to a request; those that change something are for our own user."""
        question = message.get("ask")
        if question == "list":
            caches = [asdict(cache) for cache in survey()]
            idle = self.holding.idle()
            return {"pid": os.getpid(), "caches": caches, "idle": idle, **self.holding.limits()}
        if question == "metrics":
            return {"text": self.metrics()}
        if question in ("admit", "admit_disk", "look") and not is_owner:
            return {"refused": "only the user of the service may have caches here"}
        if question == "look":
            self.holding.look()
            return {}
        if question == "admit":
            values = _checked(
                message, {"name": str, "memory": int, "capacity": int, "regions": list}
            )
            return {"room": self.holding.admit(**values)}
        if question == "admit_disk":
            return {
                "room": self.holding.admit_disk(**_checked(message, {"path": str, "size": int}))
            }
        return {"refused": f"nothing is known of {str(question)[:40]!r}"}

    def close(self) -> None:
        """Let go of everything. May be called again."""
        self.stop()
        for listener, path in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            unforked.drop(listener)
            path.unlink(missing_ok=True)
        self._listeners = []
        if self._metrics is not None:
            self._metrics.close()
        for thread in self._threads:
            thread.join(PATIENCE)
        if hasattr(self, "holding"):
            self.holding.close()
        unforked.drop(self._lock)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, path: Path, group: int | None) -> None:
        try:
            path.unlink(missing_ok=True)
            with unforked.no_fork:
                listener = unforked.keep(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listeners.append((listener, path))
            before = os.umask(0o177)  # nobody may connect before the mode is right
            try:
                with SocketAddress(path) as address:
                    listener.bind(address)
            finally:
                os.umask(before)
            if group is not None:
                os.chown(path, -1, group)
                path.chmod(0o660)
            listener.listen(_MOST_CLIENTS)
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error}") from error

    def _accepting(self, listener: socket.socket, path: Path) -> Callable[[], None]:
        def accept() -> None:
            while not self._stopping.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    if self._stopping.wait(0.05):
                        return
                    continue
                self._admit(connection, path)

        return accept

    def _admit(self, connection: socket.socket, path: Path) -> None:
        """Hear a client in a thread of its own, if it may be heard and there are not too many."""
        is_owner = False
        with contextlib.suppress(OSError):
            _, uid, gid = protocol.peer(connection)
            is_owner = uid == os.geteuid()
            allowed = is_owner or (path == self.settings.socket and self._is_member(uid, gid))
            if allowed and self._clients.acquire(blocking=False):
                thread = threading.Thread(
                    target=self._serve, args=(connection, is_owner), daemon=True
                )
                thread.start()
                return
        connection.close()

    def _is_member(self, uid: int, gid: int) -> bool:
        wanted = self.settings.group_id()
        try:
            return wanted in os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
        except KeyError:
            return wanted == gid

    def _serve(self, connection: socket.socket, is_owner: bool) -> None:
        deadline = time.monotonic() + PATIENCE
        try:
            with connection:
                answer = self._hear(connection, deadline, is_owner)
                line = json_line(answer)
                connection.settimeout(PATIENCE)
                connection.sendall(line)
        except OSError:
            pass  # it has gone, or never said anything
        finally:
            self._clients.release()

    def _hear(self, connection: socket.socket, deadline: float, is_owner: bool) -> dict[str, Any]:
        try:
            message = protocol.parse(protocol.read_line(connection, MAX_REQUEST, deadline))
            return self.answer(message, is_owner=is_owner)
        except TimeoutError:
            raise
        except (OSError, ConfigError) as error:
            return {"refused": str(error)}


def json_line(answer: dict[str, Any]) -> bytes:
    """Return an answer as it is sent; one that would be too long becomes a refusal."""
    line = json.dumps({"stoker": VERSION, **answer}, default=str).encode() + b"\n"
    if len(line) > MAX_ANSWER:
        return json.dumps({"stoker": VERSION, "refused": "the answer is too long"}).encode() + b"\n"
    return line


def _checked(message: dict[str, Any], kinds: dict[str, type]) -> dict[str, Any]:
    """Return the values of a request by name; ConfigError for one that is missing or odd."""
    for name, kind in kinds.items():
        value = message.get(name)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 2**60):
            raise ConfigError(f"{name} is no {kind.__name__} that could be meant")
    return {name: message[name] for name in kinds}


def _lock(path: Path) -> Descriptor:
    with unforked.no_fork:
        lock = unforked.keep(
            Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        )
    if not try_lock(lock.fileno()):
        unforked.drop(lock)
        raise ConfigError(f"a service runs already in {path.parent}: stop it first")
    return lock

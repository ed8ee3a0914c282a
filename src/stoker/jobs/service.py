"""The service of a node: keeps caches between jobs, and reports them."""

from __future__ import annotations

import contextlib
import grp
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from stoker.errors import ConfigError, StokerError, UntrustedPath
from stoker.jobs import protocol
from stoker.jobs.group_cache import GroupCaches
from stoker.jobs.group_files import SharedFolder
from stoker.jobs.holding import Asker, Holding
from stoker.jobs.http_server import MetricsServer
from stoker.jobs.metrics import exposition
from stoker.jobs.protocol import MAX_ANSWER, MAX_REQUEST, PATIENCE, VERSION
from stoker.jobs.quotas import Quota, flow_of, quota_of_user
from stoker.jobs.survey import survey
from stoker.node import descriptors, messages
from stoker.node.bandwidth import FetchShare, limit_bandwidth
from stoker.node.descriptors import Descriptor
from stoker.node.hosting import Host, host_path
from stoker.node.locks import try_lock_file
from stoker.node.messages import is_ours, listen, open_to, parse, peer, read_line
from stoker.node.runtime_dir import prepare_runtime_dir

log = logging.getLogger("stoker")

_LOOK = 0.25  # seconds between two looks for new caches
_MOST_CLIENTS = 32  # heard at the same time, of our own; further ones wait in the kernel's queue
_MOST_LOOKERS = 16  # of others; further ones wait their turn
_MOST_OF_ONE = 4  # of those, by the same user
_MOST_WAITING = 64  # of others; further ones are turned away
_MOST_OF_ONE_WAITING = 16  # of those, of the same user: a job's processes come all at once
_LONGEST_TEXT = 200  # letters of what a job says of itself
_FRESH = 0.5  # seconds for which answers to others are not looked up again


@dataclass(frozen=True)
class ServiceSettings:
    """Limits and sockets of a service; bad values raise :class:`~stoker.errors.ConfigError`."""

    memory: int | None = None
    """Maximum bytes of memory of all caches of this user together; None: no limit."""
    disk: int | None = None
    """Bytes of disk, likewise."""
    quotas: tuple[Quota, ...] = ()
    """For the caches that jobs of some names made, or of a user; the first that matches counts."""
    bandwidth: int | None = None
    """Bytes per second that all jobs of this user fetch together; None: no limit."""
    keep: float | None = None
    """Seconds for which a cache without a job is held; None: until its memory is needed."""
    socket: Path | None = None
    """Where it listens beside the runtime directory, for members of ``group``."""
    group: str | None = None
    """Name or number of the group whose members may read at ``socket``, and use ``shares``."""
    shares: tuple[SharedFolder, ...] = ()
    """Folders of which they share a cache, if they may read them."""
    metrics_port: int | None = None
    """Port for Prometheus; 0: any free port."""
    metrics_host: str = "127.0.0.1"
    """Address of this machine, or container, where that port is."""
    hosts: bool = True
    """Whether it starts the processes that read ahead for this user's jobs."""

    def __post_init__(self) -> None:
        for name in ("memory", "disk", "keep", "metrics_port"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}={value!r} is invalid: give 0 or more")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ConfigError(f"bandwidth={self.bandwidth!r} is invalid: give more than 0")
        if self.metrics_port is not None and self.metrics_port > 65535:
            raise ConfigError(f"metrics_port={self.metrics_port} is no port: give 0 to 65535")
        if (self.socket is None) != (self.group is None):
            raise ConfigError(
                f"socket={self.socket} and group={self.group!r}: give both or neither, as the "
                "runtime directory admits no other user"
            )
        if self.shares and self.socket is None:
            raise ConfigError(
                f"share={[str(each.path) for each in self.shares]} needs a group: give socket and "
                "group too"
            )
        if self.group is not None:
            self.group_id()

    def group_id(self) -> int:
        """Return the number of :attr:`group`; ConfigError if there is none of that name."""
        name = str(self.group)
        if name.isdecimal():
            return int(name)
        try:
            return grp.getgrnam(name).gr_gid
        except KeyError as error:
            raise ConfigError(f"group={self.group!r} does not exist: see `getent group`") from error


class _Listener(NamedTuple):
    """A socket where clients connect, and its handler."""

    listener: socket.socket
    path: Path
    inode: int
    hear: Callable[[socket.socket], None]


class _Stop:
    """An event that a signal handler may set, which may have interrupted one who waits for it.

    One who waits for a :class:`threading.Event` holds its lock for moments, which setting it needs.
    """

    def __init__(self) -> None:
        self._told: SimpleQueue[None] = SimpleQueue()
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._told.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Return whether it is set, after at most that many seconds."""
        try:
            self._told.get(timeout=timeout)
        except Empty:
            return self._is_set
        self._told.put(None)  # for the others who wait
        return True


class _Lookers:
    """Members of a group, few of whom are heard at the same time, and fewer of one user.

    ``hear(connection, leave)`` begins to serve one, for whom ``leave`` is called in the end.
    """

    def __init__(self, hear: Callable[[socket.socket, Callable[[], object]], object]) -> None:
        self._hear = hear
        self._mutex = threading.Lock()
        self._heard: Counter[int] = Counter()  # by user
        self._waiting: list[tuple[socket.socket, int]] = []

    def come(self, connection: socket.socket, user: int) -> None:
        """Have one served now or in its turn; it is turned away where too many wait."""
        with self._mutex:
            if self._has_turn(user):
                self._heard[user] += 1
            else:
                of_user = sum(each == user for _, each in self._waiting)
                if len(self._waiting) < _MOST_WAITING and of_user < _MOST_OF_ONE_WAITING:
                    self._waiting.append((connection, user))
                else:
                    connection.close()
                return
        self._hear(connection, lambda: self._leave(user))

    def close(self) -> None:
        """Turn away all who wait."""
        with self._mutex:
            waiting, self._waiting = self._waiting, []
        for connection, _ in waiting:
            connection.close()

    def _leave(self, user: int) -> None:
        with self._mutex:
            self._heard[user] -= 1
            self._heard += Counter()  # forget those of whom there is none
            place = next((n for n, (_, of) in enumerate(self._waiting) if self._has_turn(of)), None)
            if place is None:
                return
            connection, following = self._waiting.pop(place)
            self._heard[following] += 1
        try:
            self._hear(connection, lambda: self._leave(following))
        except RuntimeError as error:  # no thread is available
            log.info("a client could not be served: %s", error)
            connection.close()

    def _has_turn(self, user: int) -> bool:
        return self._heard.total() < _MOST_LOOKERS and self._heard[user] < _MOST_OF_ONE


class Service:
    """Holds this user's caches, and answers requests, until :meth:`stop`. Also a context manager.

    One per runtime directory. Nothing depends on it: running jobs continue when it ends, and a
    later one finds their caches. Each request is one line of JSON of bounded size that must arrive
    within :data:`~stoker.jobs.protocol.PATIENCE`; the kernel says who asks, and other users get no
    answer. Few members of the group are served at a time, so they never delay our own jobs.

    Raises :class:`~stoker.errors.ConfigError` if another one runs or a socket cannot be bound, and
    :class:`~stoker.errors.UntrustedPath` for a runtime directory that is not safe or a file in the
    way of a socket.
    """

    def __init__(self, settings: ServiceSettings | None = None) -> None:
        self.settings = settings = settings or ServiceSettings()
        folder = prepare_runtime_dir()
        self._lock = _lock(folder / "service.lock")
        self._stopping = _Stop()
        self._clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        self._lookers = _Lookers(self._hear_looker)
        self._host = Host()
        self._told: dict[str, tuple[float, dict[str, Any]]] = {}
        self._telling = threading.Lock()
        self._listeners: list[_Listener] = []
        self._threads: list[threading.Thread] = []
        self._metrics: MetricsServer | None = None
        try:
            self.holding = Holding(settings.memory, settings.disk, settings.keep, settings.quotas)
            self._groups = GroupCaches(settings.shares, self.holding.has_room, self._allowance)
            self._flows: dict[int, FetchShare] = {}  # by user, of what is read for groups
            self._allowing = threading.Lock()
            self._renew_limit()
            self._listen(protocol.service_path(), None, self._hear_our_own)
            if settings.hosts:
                self._listen(host_path(), None, self._host.hear, socket.SOCK_SEQPACKET)
            if settings.socket is not None:
                self._listen(settings.socket, settings.group_id(), self._hear_others)
            if settings.metrics_port is not None:
                self._metrics = MetricsServer(
                    settings.metrics_host,
                    settings.metrics_port,
                    lambda: str(self._told_to_others("metrics")["text"]),
                )
        except BaseException:
            self.close()
            raise

    @property
    def metrics_port(self) -> int | None:
        """Address of the metrics over HTTP."""
        return None if self._metrics is None else self._metrics.port

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        serving: list[Callable[[], None]] = [self._accepting(each) for each in self._listeners]
        # Which may take seconds, and longer on disk.
        serving += [self._balancing(self.holding.balance)]
        serving += [self._balancing(self.holding.balance_disk)]
        if self._metrics is not None:
            serving.append(self._metrics.run)
        if self.settings.shares:
            serving.append(self._list_shares)  # which may take minutes
        self._threads = [threading.Thread(target=each, daemon=True) for each in serving]
        for thread in self._threads:
            thread.start()
        while not self._stopping.wait(_LOOK):
            try:
                self.holding.look()
                self._renew_limit()
            except (StokerError, OSError) as error:
                log.warning("cannot look for caches: %s", error)

    def _list_shares(self) -> None:
        while not self._stopping.is_set():
            self._groups.look()
            self.holding.memory_aside = self._groups.memory
            self.holding.read_for = self._groups.read_for()
            self._stopping.wait(_LOOK)

    def _balancing(self, balance: Callable[[], None]) -> Callable[[], None]:
        def serve() -> None:
            while not self._stopping.wait(_LOOK):
                try:
                    balance()
                except Exception:  # a defect of ours, too, must not end it for good
                    log.warning("caches are not divided again", exc_info=True)

        return serve

    @contextlib.contextmanager
    def _allowance(self, user: int) -> Iterator[tuple[float, FetchShare]]:
        """Return the bytes that may yet be read for a user of a group, and at which share.

        One request at a time is told, so that what it takes counts for the next one.
        """
        with self._allowing:
            self.holding.read_for = self._groups.read_for()
            if user not in self._flows:
                quota = quota_of_user(user, self.settings.quotas) or Quota(f"user={user}")
                self._flows[user] = FetchShare(quota.flow, quota.weight or 1.0)
            yield self.holding.room_of(user), self._flows[user]

    def _renew_limit(self) -> None:
        """Limit the bandwidth of fetches for a while; without a service there is no limit."""
        if self.settings.bandwidth is not None:
            limit_bandwidth(self.settings.bandwidth)

    def stop(self) -> None:
        """Make :meth:`run` return soon; safe in a signal handler."""
        self._stopping.set()

    def metrics(self) -> str:
        """Return what Prometheus reads."""
        limits = {**self.holding.limits(), "quotas": self.holding.quotas()}
        return exposition([cache.told() for cache in survey()], limits)

    def answer(self, message: dict[str, Any], *, is_owner: bool) -> dict[str, Any]:
        """Return the answer to a request; those that change something are for our own user."""
        question = message.get("ask")
        if question in ("list", "metrics") and not is_owner:
            return self._told_to_others(question)
        if question == "list":
            caches = [cache.told() for cache in survey()]
            idle = self.holding.idle()
            return {
                "pid": os.getpid(),
                "caches": caches,
                "idle": idle,
                "turned_down": self.holding.turned_down(),
                "limited": self.holding.limited(),
                "quotas": self.holding.quotas(),
                "bandwidth_limit": self.settings.bandwidth,
                "shared": self._groups.told(),
                "hosted": self._host.count,
                **self.holding.limits(),
            }
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
            asker = _asker(message)
            least = _checked(message, {"least": int})["least"] if "least" in message else None
            room = self.holding.admit(**values, asker=asker, least=least)
            may_come = self.holding.could_ever(values["memory"], asker.job)
            share = flow_of(asker.job, os.geteuid(), self.settings.quotas)
            return {
                "room": room,
                "is_final": not may_come,
                "flow": None if share is None else [share.token, share.weight],
                "now": None if least is None else self.holding.granted(values["name"]),
            }
        if question == "admit_disk":
            values = _checked(message, {"path": str, "size": int})
            least = _checked(message, {"least": int})["least"] if "least" in message else None
            room = self.holding.admit_disk(**values, asker=_asker(message), least=least)
            return {"room": room, "now": self.holding.granted_on_disk(values["path"])}
        return {"refused": f"nothing is known of {str(question)[:40]!r}"}

    def _told_to_others(self, question: str) -> dict[str, Any]:
        """Return the answer, looked up now and then: looking asks every job, and takes its time."""
        with self._telling:
            since, answer = self._told.get(question, (-_FRESH, {}))
            if time.monotonic() - since >= _FRESH:
                answer = self.answer({"ask": question}, is_owner=True)
                self._told[question] = time.monotonic(), answer
            return answer

    def close(self) -> None:
        """Let go of everything. May be called again."""
        self.stop()
        for each in self._listeners:
            with contextlib.suppress(OSError):
                each.listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            descriptors.drop(each.listener)
            with contextlib.suppress(OSError):
                if each.path.lstat().st_ino == each.inode:  # not what has taken its place
                    each.path.unlink()
        self._listeners = []
        self._lookers.close()
        if self._metrics is not None:
            self._metrics.close()
        if hasattr(self, "_groups"):
            self._groups.close()
        for thread in self._threads:
            thread.join(PATIENCE)
        if hasattr(self, "holding"):
            self.holding.close()
            if self.settings.bandwidth is not None:
                with contextlib.suppress(StokerError, OSError):
                    limit_bandwidth(0)
        descriptors.drop(self._lock)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(
        self,
        path: Path,
        group: int | None,
        hear: Callable[[socket.socket], None],
        kind: socket.SocketKind = socket.SOCK_STREAM,
    ) -> None:
        try:
            listener = listen(path, kind)
            try:
                inode = open_to(path, group)
            except BaseException:
                descriptors.drop(listener)
                raise
            self._listeners.append(_Listener(listener, path, inode, hear))
        except UntrustedPath:
            raise
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error}") from error

    def _accepting(self, at: _Listener) -> Callable[[], None]:
        def accept() -> None:
            while not self._stopping.is_set():
                try:
                    connection, _ = at.listener.accept()
                except OSError:
                    if self._stopping.wait(0.05):
                        return
                    continue
                try:
                    at.hear(connection)
                except (OSError, RuntimeError) as error:  # it has gone; no thread is available
                    log.info("a client could not be served: %s", error)
                    connection.close()

        return accept

    def _hear_our_own(self, connection: socket.socket) -> None:
        """Hear a job of our user's; when there are many at once, as soon as one has been served."""
        if not is_ours(connection):
            connection.close()
            return
        while not self._clients.acquire(timeout=_LOOK):
            if self._stopping.is_set():
                connection.close()
                return
        self._serve_aside(connection, self._clients.release, is_owner=True)

    def _hear_others(self, connection: socket.socket) -> None:
        """Serve a member of the group in its turn, unless too many wait."""
        is_member = is_ours(connection) or messages.is_member(connection, self.settings.group_id())
        if is_member:
            self._lookers.come(connection, peer(connection).user)
        else:
            connection.close()

    def _hear_looker(self, connection: socket.socket, leave: Callable[[], object]) -> None:
        self._serve_aside(connection, leave, is_owner=is_ours(connection))

    def _serve_aside(
        self, connection: socket.socket, leave: Callable[[], object], *, is_owner: bool
    ) -> None:
        """Serve a client in a thread of its own; ``leave`` is called when it has been served."""
        serve = threading.Thread(
            target=self._serve, args=(connection, leave, is_owner), daemon=True
        )
        try:
            serve.start()
        except BaseException:
            leave()
            raise

    def _serve(
        self, connection: socket.socket, leave: Callable[[], object], is_owner: bool
    ) -> None:
        deadline = time.monotonic() + PATIENCE
        try:
            with contextlib.ExitStack() as until_left, connection:
                until_left.callback(leave)
                message, answer = self._hear(connection, deadline, is_owner)
                if answer is None:
                    until_left.close()  # a member stays, and counts as one
                    self._groups.attend(connection, peer(connection).user, message)
                    return
                connection.settimeout(PATIENCE)
                connection.sendall(json_line(answer))
        except OSError:
            pass  # it has gone, or never said anything

    def _hear(
        self, connection: socket.socket, deadline: float, is_owner: bool
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return a request and its answer; None for one to join, which begins a conversation."""
        message: dict[str, Any] = {}
        try:
            message = parse(read_line(connection, MAX_REQUEST, deadline), VERSION)
            if message.get("ask") == "join":
                return message, None
            return message, self.answer(message, is_owner=is_owner)
        except TimeoutError:
            raise
        except (OSError, ConfigError) as error:
            return message, {"refused": str(error)}


def json_line(answer: dict[str, Any]) -> bytes:
    """Return an answer as it is sent; one that would be too long becomes a refusal."""
    line = json.dumps({"stoker": VERSION, **answer}, default=str).encode() + b"\n"
    if len(line) > MAX_ANSWER:
        return json.dumps({"stoker": VERSION, "refused": "the answer is too long"}).encode() + b"\n"
    return line


def _asker(message: dict[str, Any]) -> Asker:
    """Return who asks, as far as the job says; those of an older Stoker do not."""
    job, data = (str(message.get(name, ""))[:_LONGEST_TEXT] for name in ("job", "data"))
    return Asker(job, data, message.get("waits") is True)


def _checked(message: dict[str, Any], kinds: dict[str, type]) -> dict[str, Any]:
    """Return the values of a request by name; ConfigError for one that is missing or malformed."""
    for name, kind in kinds.items():
        value = message.get(name)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 2**60):
            raise ConfigError(f"{name} is no {kind.__name__} that could be meant")
    return {name: message[name] for name in kinds}


def _lock(path: Path) -> Descriptor:
    lock = try_lock_file(path)
    if lock is None:
        raise ConfigError(f"a service runs already in {path.parent}: stop it first")
    return lock

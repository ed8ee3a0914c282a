"""The servers of a pool as one process sees them: their buckets, and connections."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.pool.pool_address import PoolAddress, server_name
from stoker.pool.values import BUCKETS, PoolKeys
from stoker.shared import SharedArray

_ROWS = 64
_POINTS, _UNTIL, _PAUSE, _TRIPS, _NAME = range(5)
_LIMIT = 3  # points: an error or a slow answer is one, an answer that did not come is three
_FIRST, _LONGEST = 1.0, 30.0  # seconds
_PROBE = 2.0  # seconds that a probing process has before another one may probe


class Breakers:
    """A breaker per server name, shared by all processes of a job on one machine.

    Closed, a server is used. :data:`_LIMIT` points in a row open it, and it is skipped for a
    pause of about a second, twice as long each time, half a minute at most, and never the same
    for any two, so that jobs do not return together. When the pause is over one process probes:
    if the server answers the breaker closes. There are 64; servers beyond that many share them.
    Nothing here waits or takes a lock: racing processes may probe twice, or lose a point.
    ``clock`` is one that all processes of a machine agree on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = SharedArray.create((_ROWS, 5), np.float64, name="stoker-pool-breakers")
        self._clock = clock

    def is_open(self, name: str) -> bool:
        """Whether the server is to be skipped."""
        return bool(self._row(name)[_UNTIL])

    def failed(self, name: str, *, is_late: bool = False) -> None:
        """Note an error of the server, or that its answer did not come in time."""
        row = self._row(name)
        row[_POINTS] += _LIMIT if is_late else 1
        if row[_POINTS] >= _LIMIT and not row[_UNTIL]:
            self.trip(name)

    def answered(self, name: str, *, is_slow: bool = False) -> None:
        """Note an answer; one that took more than half of its time counts against the server."""
        if is_slow:
            self.failed(name)
            return
        row = self._row(name)
        if not row[_UNTIL]:
            row[_POINTS], row[_PAUSE] = 0.0, 0.0

    def trip(self, name: str) -> None:
        """Skip the server, from now on for a pause."""
        row = self._row(name)
        row[_PAUSE] = min(_LONGEST, max(_FIRST, 2 * row[_PAUSE]))
        row[_TRIPS] += 1
        row[_UNTIL] = self._clock() + row[_PAUSE] * random.uniform(0.5, 1.5)

    def may_probe(self, name: str) -> bool:
        """Whether the caller should probe now whether the server is back."""
        row = self._row(name)
        now = self._clock()
        if not row[_UNTIL] or now < row[_UNTIL]:
            return False
        row[_UNTIL] = now + _PROBE
        return True

    def close(self, name: str) -> None:
        """Use the server again; the next pause is a longer one, unless it proves itself."""
        row = self._row(name)
        row[_POINTS], row[_UNTIL] = 0.0, 0.0

    @property
    def open_count(self) -> int:
        """How many servers are skipped now."""
        return int(np.count_nonzero(self._table.array[:, _UNTIL]))

    @property
    def trips(self) -> int:
        """How often a server began to be skipped."""
        return int(self._table.array[:, _TRIPS].sum())

    def _row(self, name: str) -> np.ndarray:
        """Return the server's row, the first of its probe sequence that no other server has."""
        table: np.ndarray = self._table.array
        digest = hashlib.blake2b(name.encode(), digest_size=6).digest()
        mark = int.from_bytes(digest) + 1  # exact as a float
        home = mark % _ROWS
        for index in (*range(home, _ROWS), *range(home)):
            if table[index, _NAME] == 0:
                table[index, _NAME] = mark
            if table[index, _NAME] == mark:  # else another process took it at the same moment
                return cast(np.ndarray, table[index])
        return cast(np.ndarray, table[home])


Command = tuple[Any, ...]
"""A command of the protocol: its name and arguments."""


def require_redis() -> None:
    """Raise :class:`~stoker.errors.ConfigError` where the client is not installed."""
    try:
        import redis  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"pool=... needs redis-py ({error}): pip install 'stoker[cluster]'"
        ) from error


@dataclass(frozen=True)
class Routes:
    """Which server has which bucket."""

    names: tuple[str, ...]
    """Of the servers that hold samples, ``host:port``."""
    of_bucket: NDArray[np.int64]
    """``i64[BUCKETS]``, an index into ``names``, -1 where no server has it."""
    is_cluster: bool


class PoolServers:
    """Connections to the servers at ``address``, which are a cluster or stand alone.

    A cluster says itself where its slots are; other servers share out the buckets in the order of
    their names, so that all clients that list the same servers agree. Nothing is opened before the
    first use. Methods raise redis-py's errors and OSError, after the address's timeout a step at
    the latest. Safe in any thread; of one process.
    """

    def __init__(self, address: PoolAddress, keys: PoolKeys) -> None:
        self._address = address
        self._keys = keys
        self._mutex = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._idle: dict[str, list[Any]] = {}
        self._is_closed = False
        self.routes: Routes | None = None
        """As they were found last; None until then."""

    def find(self) -> Routes:
        """Ask the servers which has what, and return it."""
        from redis.exceptions import RedisClusterException, RedisError, ResponseError

        servers = dict.fromkeys([*self._address.servers, *self._known()])
        failure: Exception | None = None
        for host, port in servers:
            try:
                with self.connection(server_name(host, port)) as connection:
                    connection.send_command("CLUSTER", "SLOTS")
                    connection.read_response()
                self.routes = self._of_cluster(host, port)
                return self.routes
            except ResponseError as error:
                if "cluster support disabled" not in str(error):
                    failure = error
                    continue
                self.routes = self._of_alone()
                return self.routes
            except (RedisError, RedisClusterException, OSError) as error:
                failure = error
        assert failure is not None
        raise failure

    def exchange(self, name: str, commands: Sequence[Command]) -> list[Any]:
        """Send ``commands`` to the server ``name`` in one go; return the answers.

        An answer that is an error of one command is returned, as an exception, not raised.
        """
        with self.connection(name) as connection:
            ask(connection, commands)
            return answers(connection, len(commands))

    @contextlib.contextmanager
    def connection(self, name: str) -> Iterator[Any]:
        """Lend a connection to the server ``name``; after an error it is not used again."""
        connection = self.take(name)
        if connection is None:
            connection = self._opened(name)
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        self.give_back(name, connection)

    def take(self, name: str) -> Any | None:
        """Return a connection that is open and not in use; None if there is none."""
        with self._mutex:
            idle = self._idle.get(name)
            return idle.pop() if idle else None

    def give_back(self, name: str, connection: Any) -> None:
        """Let others use a connection on which nothing is under way."""
        with self._mutex:
            if not self._is_closed:
                self._idle.setdefault(name, []).append(connection)
                return
        connection.disconnect()

    def open(self, name: str) -> None:
        """Open one more connection, for :meth:`take`."""
        self.give_back(name, self._opened(name))

    def drop(self, name: str) -> None:
        """Close unused connections: the server was replaced, or is away."""
        with self._mutex:
            idle = self._idle.pop(name, [])
        for connection in idle:
            connection.disconnect()

    def close(self) -> None:
        """Close all connections, those in use when they are given back."""
        with self._mutex:
            self._is_closed = True
            names = list(self._idle)
        for name in names:
            self.drop(name)

    def _known(self) -> list[tuple[str, int]]:
        """Return the servers of the cluster as it was: any of them knows of the others."""
        if self.routes is None or not self.routes.is_cluster:
            return []
        return [_split(name) for name in self.routes.names]

    def _of_cluster(self, host: str, port: int) -> Routes:
        """Return the routes as the cluster's server at ``host`` and ``port`` knows them."""
        from redis.cluster import ClusterNode, RedisCluster

        cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port)],  # type: ignore[no-untyped-call]
            require_full_coverage=False,
            **self._address.client_options(),
        )
        try:
            owners = dict(cluster.nodes_manager.slots_cache)
        finally:
            cluster.close()
        primaries = {slot: nodes[0] for slot, nodes in owners.items()}
        names = sorted({server_name(node.host, node.port) for node in primaries.values()})
        number = {name: index for index, name in enumerate(names)}
        of_bucket = np.full(BUCKETS, -1, np.int64)
        for bucket, slot in enumerate(self._keys.slots.tolist()):
            node = primaries.get(slot)
            if node is not None:
                of_bucket[bucket] = number[server_name(node.host, node.port)]
        return Routes(tuple(names), of_bucket, is_cluster=True)

    def _of_alone(self) -> Routes:
        names = sorted({server_name(*server) for server in self._address.servers})
        return Routes(tuple(names), np.arange(BUCKETS) * len(names) // BUCKETS, is_cluster=False)

    def _opened(self, name: str) -> Any:
        with self._mutex:
            client = self._clients.get(name)
            if client is None:
                from redis import Redis

                host, port = _split(name)
                options = self._address.client_options()
                client = self._clients[name] = Redis(host=host, port=port, **options)
        connection = client.connection_pool.make_connection()
        connection.connect()
        return connection


def ask(connection: Any, commands: Sequence[Command]) -> None:
    """Send commands in one go."""
    try:
        from hiredis import pack_command
    except ImportError:
        packed = connection.pack_commands(commands)
    else:
        packed = [b"".join(map(pack_command, commands))]  # redis-py looks at each argument first
    connection.send_packed_command(packed)


def answers(connection: Any, count: int) -> list[Any]:
    """Return the next ``count`` answers; those that are errors of one command as exceptions."""
    from redis.exceptions import ResponseError

    found: list[Any] = []
    for _ in range(count):
        try:
            found.append(connection.read_response())
        except ResponseError as error:
            found.append(error)
    return found


def fileno(connection: Any) -> int:
    """Return the descriptor of a connection's socket; -1 if it is closed."""
    own = getattr(connection, "_sock", None)
    return -1 if own is None else int(own.fileno())


def cut(connection: Any) -> None:
    """End the wait for a connection, from a thread other than the waiting one."""
    # By another handle: that of TLS would be changed under the hands of who uses it.
    with (
        contextlib.suppress(OSError, ValueError),
        socket.fromfd(fileno(connection), socket.AF_INET, socket.SOCK_STREAM) as other,
    ):
        other.shutdown(socket.SHUT_RDWR)


def is_elsewhere(answer: object) -> bool:
    """Whether an answer says that another server has the key by now, or for a moment none has."""
    from redis import exceptions as e

    return isinstance(answer, (e.AskError, e.ReadOnlyError, e.ClusterDownError, e.TryAgainError))


def _split(name: str) -> tuple[str, int]:
    host, _, port = name.rpartition(":")
    return host.strip("[]"), int(port)

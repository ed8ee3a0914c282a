"""The servers of a pool as one process sees them: who has which bucket, and talking to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.store.pool_address import PoolAddress, server_name
from stoker.store.pool_keys import BUCKETS, PoolKeys

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
    """``i64[BUCKETS]``, an index into ``names``, -1 where nobody has it."""
    is_cluster: bool


class PoolServers:
    """Connections to the servers at ``address``, which are a cluster or stand alone.

    A cluster says itself where its slots are; other servers share out the buckets in the order
    of their names, so that all who list the same servers agree. Nothing is opened before the
    first use. Methods raise redis-py's errors and OSError, after the address's timeout a step at
    the latest. Safe in any thread; of one process.
    """

    def __init__(self, address: PoolAddress, keys: PoolKeys) -> None:
        self._address = address
        self._keys = keys
        self._mutex = threading.Lock()
        self._clients: dict[str, Any] = {}
        self.routes: Routes | None = None
        """As they were found last; None until then."""

    def find(self) -> Routes:
        """Ask the servers who has what, and return it."""
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
        from redis.exceptions import ResponseError

        answers: list[Any] = []
        with self.connection(name) as connection:
            connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                try:
                    answers.append(connection.read_response())
                except ResponseError as error:
                    answers.append(error)
        return answers

    @contextlib.contextmanager
    def connection(self, name: str) -> Iterator[Any]:
        """Lend a connection to the server ``name``; after an error it is not used again."""
        pool = self._client(name).connection_pool
        connection = pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def close(self) -> None:
        """Close all connections that are not in use."""
        with self._mutex:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

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

    def _client(self, name: str) -> Any:
        with self._mutex:
            client = self._clients.get(name)
            if client is None:
                from redis import Redis

                host, port = _split(name)
                options = self._address.client_options()
                client = self._clients[name] = Redis(host=host, port=port, **options)
            return client


def is_elsewhere(answer: object) -> bool:
    """Whether an answer says that another server has the key by now, or for a moment none has."""
    from redis import exceptions as e

    return isinstance(answer, (e.AskError, e.ReadOnlyError, e.ClusterDownError, e.TryAgainError))


def _split(name: str) -> tuple[str, int]:
    host, _, port = name.rpartition(":")
    return host.strip("[]"), int(port)

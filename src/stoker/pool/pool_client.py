"""A pool as one process uses it: reads with a deadline, writes in the background."""

from __future__ import annotations

import itertools
import logging
import select
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.pool.pool_address import PoolAddress
from stoker.pool.servers import (
    Breakers,
    Command,
    PoolServers,
    Routes,
    ask,
    cut,
    fileno,
    is_elsewhere,
)
from stoker.pool.servers import answers as read_answers
from stoker.pool.timed_work import Call, PoolWriter, Threads, Watch
from stoker.pool.values import HEAD_BYTES, PoolKeys, PoolOrder, seal, unseal
from stoker.source.packed import Packed
from stoker.store.counters import Counters
from stoker.store.tier import Ids, Mask

log = logging.getLogger("stoker.pool")

FIELDS = (
    "pool_asked",
    "pool_hits",
    "pool_bytes",
    "pool_written",
    "pool_dropped",
    "pool_damaged",
    "pool_errors",
    "pool_seconds",
)
"""What is counted, over all processes that have the pool: samples asked for, found and their
bytes, written, not written (no room in the queue, or refused by a server), values that were not
what they should be, failures of servers, and seconds that reads took."""

_LEAST_RATE = 16 << 20  # bytes a second; a pool slower than this is no help
_REQUEST_BYTES = 1 << 20  # of answers that a server has to hold at once for one command
_WRITE_BYTES = 4 << 20  # sent in one go
_REFRESH = 2.0  # seconds between two looks for who has what, at least
ROUTES = "routes"
"""Name of the breaker of finding out who has what."""


class _Question(NamedTuple):
    """What was asked of one server."""

    server: str
    rows: list[list[int]]
    """Of each command: where in the batch its samples are."""
    connection: Any
    watch: int
    """Number of the connection in the watch."""
    asked: float
    """When it was sent."""


class PoolClient:
    """Talks to the servers of a pool for one process.

    Owns connections and threads; breakers, order and counters are the job's. No method raises
    for failures of servers: a sample is missed, or not written, and the server's breaker
    records it. Safe in any thread.
    """

    def __init__(
        self,
        address: PoolAddress,
        keys: PoolKeys,
        mean_size: float,
        breakers: Breakers,
        order: PoolOrder,
        counters: Counters,
    ) -> None:
        self.servers = PoolServers(address, keys)
        self.writer = PoolWriter()
        self.breakers = breakers
        self._address = address
        self._keys = keys
        self._frame_bytes = max(1.0, mean_size) + HEAD_BYTES
        self._order = order
        self._counters = counters
        self._threads = Threads()
        self._watch = Watch(cut)
        self._finding: Call | None = None
        self._found_at = -np.inf
        self._warned: set[str] = set()

    def limit(self, count: int) -> float:
        """Return the seconds after which a read of ``count`` samples ends in any case."""
        return self._address.timeout + count * self._frame_bytes / _LEAST_RATE

    def read(self, ids: Ids) -> tuple[Packed, Mask]:
        """Return what the pool has of samples ``u32[n]``, and which those are."""
        begin = time.monotonic()
        deadline = begin + self.limit(len(ids))
        values: list[bytes | None] = [None] * len(ids)
        routes = self.routes(deadline)
        if routes is not None:
            questions = list(self._ask(ids, routes, deadline))
            for question, answers in self._answered(questions, deadline):
                for rows, answer in zip(question.rows, answers, strict=True):
                    if isinstance(answer, list) and len(answer) == len(rows):
                        for row, value in zip(rows, answer, strict=True):
                            values[row] = value
        samples, found, damaged = unseal(ids, values, self._keys.owner)
        self._counters.add(
            pool_asked=len(ids),
            pool_hits=int(found.sum()),
            pool_bytes=int(samples.offsets[-1]),
            pool_damaged=damaged,
            pool_seconds=time.monotonic() - begin,
        )
        return samples, found

    def seal(self, ids: Ids, samples: Packed) -> list[bytes]:
        """Return copies of samples, as :meth:`write` takes them."""
        return seal(ids, samples, self._keys.owner)

    def write(self, ids: Ids, values: list[bytes], levels: NDArray[np.uint8]) -> Mask:
        """Store samples ``u32[n]`` with the lifetimes of their levels; return which are there."""
        written = np.zeros(len(ids), np.bool_)
        names, lifetimes = self._keys.names(ids), self._order.lifetimes(levels)
        commands: list[Command] = [
            ("SET", name, value, "PX", lifetime)
            for name, value, lifetime in zip(names, values, lifetimes, strict=True)
        ]
        step = max(1, int(_WRITE_BYTES / self._frame_bytes))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            written[part] = [answer == b"OK" for answer in self._tell(ids[part], commands[part])]
        count = int(written.sum())
        self._counters.add(pool_written=count, pool_dropped=len(ids) - count)
        return written

    def expire(self, ids: Ids, levels: NDArray[np.uint8]) -> None:
        """Give samples that are there the lifetimes of their levels."""
        names, lifetimes = self._keys.names(ids), self._order.lifetimes(levels)
        pairs = zip(names, lifetimes, strict=True)
        self._tell(ids, [("PEXPIRE", name, lifetime) for name, lifetime in pairs])

    def forget(self, ids: Ids) -> None:
        """Remove samples."""
        self._tell(ids, [("UNLINK", name) for name in self._keys.names(ids)])

    def routes(self, deadline: float) -> Routes | None:
        """Return which server has what, asking before ``deadline`` if it is not known yet."""
        if self.servers.routes is not None:
            return self.servers.routes
        if self._is_passed_by(ROUTES):
            return None
        call = self._finding
        if call is None:
            call = self._finding = self._threads.start(self._find)
        if call is None or not call.wait(deadline - time.monotonic()):
            self._failed(ROUTES, TimeoutError("no server says in time who has what"))
        return self.servers.routes

    def start(self, server: str, commands: list[Command]) -> Call | None:
        """Have ``commands`` sent to a server, to be waited for; None if too much is under way."""
        return self._threads.start(partial(self.servers.exchange, server, commands))

    def close(self, timeout: float) -> None:
        """Write what waits, ``timeout`` seconds at most, and release it. May be called again."""
        self.writer.close(timeout)
        self._threads.close()
        self._watch.close()
        self.servers.close()

    # --- reading ---

    def _ask(self, ids: Ids, routes: Routes, deadline: float) -> Iterator[_Question]:
        """Ask all servers at once for what they have of ``ids``."""
        names = self._keys.names(ids)
        buckets = self._keys.buckets(ids)
        owners = routes.of_bucket[buckets]
        most = max(1, int(_REQUEST_BYTES / self._frame_bytes))
        there = [(k, routes.names[k]) for k in np.unique(owners[owners >= 0]).tolist()]
        connections = self._connections([server for _, server in there], deadline)
        for owner, server in there:
            connection = connections.get(server)
            if connection is None:
                continue
            mine = np.flatnonzero(owners == owner)
            # A server of a cluster answers only for keys of one slot at a time.
            parts = _alike(mine, buckets[mine]) if routes.is_cluster else [mine.tolist()]
            rows = [part[k : k + most] for part in parts for k in range(0, len(part), most)]
            commands = [("MGET", *[names[k] for k in part]) for part in rows]
            asked, watch = time.monotonic(), self._watch.begin(connection, deadline)
            try:
                ask(connection, commands)
            except Exception as error:
                self._lost(server, connection, error, is_late=not self._watch.end(watch))
                continue
            yield _Question(server, rows, connection, watch, asked)

    def _answered(
        self, questions: list[_Question], deadline: float
    ) -> Iterator[tuple[_Question, list[Any]]]:
        """Yield the answers to questions as they come, those that come before ``deadline``."""
        waiting = {fileno(question.connection): question for question in questions}
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting:
            # Ready servers come first: one that hangs must not delay the others.
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            for fd, _ in ready:
                poll.unregister(fd)
                question = waiting.pop(fd)
                yield question, self._answers(question, deadline)
            if not ready:
                break
        for question in waiting.values():
            self._watch.end(question.watch)
            silent = TimeoutError(f"{question.server} is silent")
            self._lost(question.server, question.connection, silent, is_late=True)

    def _answers(self, question: _Question, deadline: float) -> list[Any]:
        """Return the answers to a question's commands; the first of them is there."""
        server, connection = question.server, question.connection
        try:
            answers = read_answers(connection, len(question.rows))
        except Exception as error:
            self._lost(server, connection, error, is_late=not self._watch.end(question.watch))
            return [None] * len(question.rows)
        if self._watch.end(question.watch):
            self.servers.give_back(server, connection)
        else:
            connection.disconnect()  # it was cut, just when all had come
        left = deadline - time.monotonic()
        self._look_at(server, answers)
        self.breakers.answered(server, is_slow=left < (deadline - question.asked) / 2)
        return answers

    def _connections(self, servers: list[str], deadline: float) -> dict[str, Any]:
        """Return an open connection to each server that is available.

        Opening takes half of the time until ``deadline`` at most: the rest is for the answers of
        servers that are well, beside one that hangs.
        """
        begin = time.monotonic()
        until = begin + (deadline - begin) / 2
        wanted = [server for server in servers if not self._is_passed_by(server)]
        found = {server: self.servers.take(server) for server in wanted}
        opening = {s: self._open(s) for s, connection in found.items() if connection is None}
        for server, call in opening.items():
            while found[server] is None:
                if call is None or not call.wait(until - time.monotonic()):
                    self._failed(server, TimeoutError(f"{server} takes too long to connect"))
                    break
                if call.error is not None:
                    self._failed(server, call.error)
                    break
                found[server] = self.servers.take(server)
                if found[server] is None:  # another thread was faster
                    call = self._open(server)
        return found

    def _open(self, server: str) -> Call | None:
        return self._threads.start(partial(self.servers.open, server))

    def _lost(self, server: str, connection: Any, error: Exception, *, is_late: bool) -> None:
        """Note that a connection is unusable, and its answers lost."""
        connection.disconnect()
        self.servers.drop(server)
        if is_late:
            error = TimeoutError(f"{server} did not answer in time")
        self._failed(server, error)

    # --- writing ---

    def _tell(self, ids: Ids, commands: list[Command]) -> list[Any]:
        """Send one command a sample to the servers that have them; None where there is no answer.

        In the thread of the caller, and without a limit on the whole.
        """
        answers: list[Any] = [None] * len(ids)
        routes = self.routes(time.monotonic() + self._address.timeout)
        if routes is None:
            return answers
        owners = routes.of_bucket[self._keys.buckets(ids)]
        for owner in np.unique(owners[owners >= 0]).tolist():
            server = routes.names[owner]
            if self._is_passed_by(server):
                continue
            mine = np.flatnonzero(owners == owner).tolist()
            try:
                got = self.servers.exchange(server, [commands[k] for k in mine])
            except Exception as error:
                self._failed(server, error)
                continue
            self._look_at(server, got)
            for row, answer in zip(mine, got, strict=True):
                answers[row] = answer
        return answers

    # --- faults ---

    @property
    def is_refused(self) -> bool:
        """Whether a server refused the password or user, which was told then."""
        return "password" in self._warned

    def _look_at(self, server: str, answers: list[Any]) -> None:
        """Check answers for errors, and handle them."""
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if not errors:
            return
        self._counters.add(pool_errors=len(errors))
        if any(is_elsewhere(error) for error in errors):
            self._look_for_routes()
        rest = [error for error in errors if not is_elsewhere(error)]
        if rest:
            self._warn(type(rest[0]).__name__, f"{server} refuses: {rest[0]}")

    def _failed(self, name: str, error: BaseException) -> None:
        from redis.exceptions import AuthenticationError
        from redis.exceptions import TimeoutError as RedisTimeout

        self._counters.add(pool_errors=1)
        is_late = isinstance(error, TimeoutError | RedisTimeout)
        self.breakers.failed(name, is_late=is_late or name == ROUTES)
        log.info("%s: %s", name, error)
        if isinstance(error, AuthenticationError):
            self._warn("password", f"{self._address} refuses the password or user: {error}")
        elif self.breakers.is_open(name):
            what = str(self._address) if name == ROUTES else name
            self._warn("bypass", f"{what} is bypassed for now: {error or type(error).__name__}")
        if name != ROUTES:
            self._look_for_routes()

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            whole = f"the pool fails, and samples are read from the source where it does: {message}"
            warnings.warn(whole, RuntimeWarning, stacklevel=2)

    def _is_passed_by(self, name: str) -> bool:
        """Whether ``name`` is bypassed; start a probe if it is due."""
        if not self.breakers.is_open(name):
            return False
        if self.breakers.may_probe(name):
            self.writer.put(partial(self._probe, name))
        if name != ROUTES:
            self._look_for_routes()
        return True

    def _probe(self, name: str) -> None:
        try:
            if name == ROUTES:
                self.servers.find()
            else:
                self.servers.exchange(name, [("PING",)])
        except Exception as error:
            log.info("%s is still away: %s", name, error)
            self.breakers.trip(name)
        else:
            self.breakers.close(name)

    def _find(self) -> None:
        """Find out which server has what."""
        try:
            self.servers.find()
        except Exception as error:
            self._failed(ROUTES, error)
        finally:
            self._found_at = time.monotonic()
            self._finding = None

    def _look_for_routes(self) -> None:
        """Refresh which server has what, unless that was done a moment ago."""
        routes, now = self.servers.routes, time.monotonic()
        if routes is not None and routes.is_cluster and now - self._found_at > _REFRESH:
            self._found_at = now
            self.writer.put(self._find_again)

    def _find_again(self) -> None:
        try:
            self.servers.find()
        except Exception as error:
            log.info("no server says which server has what: %s", error)  # what was known is used on


def _alike(rows: NDArray[np.int64], kinds: NDArray[np.int64]) -> list[list[int]]:
    """Return ``rows`` split by kind."""
    order = np.argsort(kinds, kind="stable")
    cuts = [0, *(np.flatnonzero(np.diff(kinds[order])) + 1).tolist(), len(rows)]
    ordered = rows[order].tolist()
    return [ordered[start:end] for start, end in itertools.pairwise(cuts)]

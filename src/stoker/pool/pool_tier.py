"""The tier on other machines: Valkey or Redis servers, a cluster or not, that all nodes share."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import util
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.pool.group_pool import GroupPlan, plan_group
from stoker.pool.pool_address import SOCKET, PoolAddress
from stoker.pool.pool_client import FIELDS, ROUTES, PoolClient
from stoker.pool.servers import Breakers, require_redis
from stoker.pool.values import PoolKeys, PoolOrder
from stoker.source.base import Source
from stoker.source.packed import Packed, pick
from stoker.store.counters import Counters
from stoker.store.disk import Wanted
from stoker.store.tier import Found, Ids, Into, Keys, Mask, NullTier
from stoker.types import format_bytes, parse_bytes

POLICY = "volatile-ttl"
"""The eviction policy under which importance decides what stays."""

_LIVE: weakref.WeakSet[PoolTier] = weakref.WeakSet()

_REORDERED_AT_ONCE = 512  # samples whose lifetimes are set in one go
_LAST_WORDS = 1.0  # seconds that a process may spend at its end on what waits to be written
_SAMPLE_OVERHEAD = 200  # bytes that a server needs for a sample beside its bytes, about
_PATIENCE = 3.0  # seconds for all servers together, when they are asked how they are set up


class PoolTier(NullTier):
    """Keeps samples of the data set ``name`` on the servers at ``address``, one copy each.

    All jobs on all nodes that give the same name, which stands for content and cache stage, find
    each other's samples. Which samples stay is decided by the servers, which evict what has the
    shortest time to live (``maxmemory-policy volatile-ttl``): that grows with the rank of a
    sample's key (:class:`~stoker.pool.values.PoolOrder`). ``capacity_bytes``: payload that
    this data set may take; only the best samples, that many, are stored. ``data_bytes``: of all
    that are visited, ``mean_size`` each, by default all ids. ``takes_keys``: as PoolOrder's.

    A server that fails or is slow is skipped, and probed again later
    (:class:`~stoker.pool.servers.Breakers`); no read takes longer than :meth:`limit`, and
    no method raises for failures of servers. Claims, regions and leases are what the tiers on the
    node have: here everyone may fetch everything, as in a :class:`~stoker.store.tier.NullTier`.

    Nothing is opened before the first use, by each process for itself. Safe in any thread;
    forked children and processes that receive it by pickling share breakers, order and counters.
    Raises :class:`~stoker.errors.ConfigError` where redis-py is not installed.
    """

    _of_process: PoolClient | None

    def __init__(
        self,
        address: PoolAddress,
        name: str,
        num_ids: int,
        data_bytes: int,
        capacity_bytes: int | None = None,
        *,
        mean_size: float | None = None,
        takes_keys: bool = True,
    ) -> None:
        require_redis()
        self.address = address
        self.keys = PoolKeys(name)
        self.breakers = Breakers()
        self.order = PoolOrder(takes_keys=takes_keys)
        self.counters = Counters(FIELDS)
        self.renews = True
        """Whether this process renews the lifetimes of all samples when their keys change; of all
        nodes one is enough."""
        self._num_ids = num_ids
        self._data_bytes = data_bytes
        self._mean_size = data_bytes / max(1, num_ids) if mean_size is None else mean_size
        self._capacity = capacity_bytes
        self._levels: NDArray[np.uint8] | None = None
        self._set_up()
        self._share(data_bytes if capacity_bytes is None else capacity_bytes)

    # --- samples ---

    reads = False
    """Servers have only what was stored there."""
    wants_plans = False
    """They evict by time to live."""

    def find(self, ids: Ids, keys: Keys = None) -> Found:
        """Return what :meth:`get_many` does."""
        return Found(*self.get_many(ids, keys), np.zeros(len(ids), np.bool_))

    def get_many(self, ids: Ids, keys: Keys = None, into: Into = None) -> tuple[Packed, Mask]:
        """Return what the pool has, after :meth:`limit` seconds at the latest."""
        samples, found = self._client().read(ids)
        if keys is not None and self.order.takes_keys and found.any():
            self.set_keys(ids[found], keys[found])
        return samples, found

    def put_many(self, ids: Ids, samples: Packed, keys: Keys = None) -> Mask:
        """Store samples, and return which are there; waits for the servers."""
        levels = self.order.levels(ids, keys)
        worth = np.flatnonzero(self.order.is_worth_storing(levels))
        kept = np.zeros(len(ids), np.bool_)
        client = self._client()
        values = client.seal(ids[worth], pick(samples, worth))
        kept[worth] = client.write(ids[worth], values, levels[worth])
        return kept

    def offer(self, ids: Ids, samples: Packed, keys: Keys = None) -> None:
        """Queue samples for storing without waiting; dropped if the queue is full.

        They are copied at once, and may be changed afterwards.
        """
        levels = self.order.levels(ids, keys)
        worth = np.flatnonzero(self.order.is_worth_storing(levels))
        if not worth.size:
            return
        client = self._client()
        values = client.seal(ids[worth], pick(samples, worth))
        job = partial(client.write, ids[worth], values, levels[worth])
        if not client.writer.put(job, sum(map(len, values))):
            self.counters.add(pool_dropped=len(worth))

    def set_keys(self, ids: Ids, keys: NDArray[np.float64]) -> None:
        """Give samples the lifetimes of their new keys, without waiting."""
        client = self._client()
        client.writer.put(partial(client.expire, ids, self.order.levels(ids, keys)))

    def begin_plan(self, ids: Ids, length: int, *, is_last: bool) -> None:
        """Do nothing: servers evict by time to live."""

    def pass_by(self, accesses: int) -> None:
        """Do nothing."""

    def reorder(self, keys: NDArray[np.float64]) -> None:
        """Take ``keys`` (``f64[N]``) as those of all samples, and renew lifetimes that change.

        In small batches, behind everything else, and only where :attr:`renews`. Nothing happens
        where keys do not matter.
        """
        self.order.learn(keys)
        if not self.renews or not self.order.takes_keys:
            return
        every = np.arange(self._num_ids, dtype=np.uint32)
        levels = self.order.levels(every, keys)
        old, self._levels = self._levels, levels
        changed = every if old is None else every[levels != old]
        client = self._client()
        client.writer.later(
            [
                partial(client.expire, part, levels[part])
                for part in np.split(
                    changed, range(_REORDERED_AT_ONCE, len(changed), _REORDERED_AT_ONCE)
                )
                if part.size
            ]
        )

    def discard(self, ids: Ids) -> None:
        """Have samples removed, without waiting."""
        if len(ids):
            client = self._client()
            client.writer.put(partial(client.forget, ids))

    # --- the servers ---

    def limit(self, count: int) -> float:
        """Return the seconds after which a read of ``count`` samples ends in any case.

        The address's timeout, and the time that their bytes take at 16 MiB/s.
        """
        return self._client().limit(count)

    def survey(self) -> list[ServerState]:
        """Ask the servers how they are set up and what they hold; takes a few seconds at most."""
        return survey(self._client(), self.address)

    def look(self) -> list[ServerState]:
        """Ask the servers how they are set up; warn about wrong settings.

        Their memory then limits what is stored.
        """
        states = self.survey()
        if self._client().is_refused:
            return states
        for message in advise(states, self.address, self._capacity):
            warnings.warn(f"the pool: {message}", RuntimeWarning, stacklevel=2)
        room = total_room(states)
        if room is not None:
            share = self._mean_size / (self._mean_size + _SAMPLE_OVERHEAD)  # of room
            fitting = min(self._data_bytes, int(room * share))
            self._share(fitting if self._capacity is None else min(fitting, self._capacity))
        return states

    def flush(self, timeout: float) -> bool:
        """Wait until this process has written what waits; return whether it has."""
        return self._client().writer.flush(timeout)

    def stats(self) -> dict[str, Any]:
        """Return what this job's processes counted, without asking the servers.

        ``capacity_bytes`` is what is stored at most of this data set, and ``payload_bytes`` and
        ``entries`` are zero, as only the servers know (``stoker pool status``). ``pool_open`` is
        how many servers are skipped now, ``pool_trips`` how often that began.
        """
        counts = {
            name: value if name.endswith("_seconds") else int(value)
            for name, value in self.counters.totals().items()
        }
        return {
            "capacity_bytes": int(self.order.share * self._data_bytes),
            "payload_bytes": 0,
            "entries": 0,
            "regions": {},
            **counts,
            "pool_open": self._passed_by(),
            "pool_trips": self.breakers.trips,
        }

    def close(self) -> None:
        """Write what waits, for a second at most, and release it. May be called again."""
        with self._mutex:
            client, self._of_process = self._of_process, None
        if client is not None:
            self._at_exit()

    # --- inside ---

    def _passed_by(self) -> int:
        """Return how many servers are skipped; at least 1 if none says which has what."""
        count = self.breakers.open_count
        return max(1, count - 1) if self.breakers.is_open(ROUTES) else count

    def _share(self, capacity: int) -> None:
        self.order.share = min(1.0, capacity / self._data_bytes) if self._data_bytes else 1.0

    def _client(self) -> PoolClient:
        with self._mutex:
            if self._of_process is None:
                client = PoolClient(
                    self.address,
                    self.keys,
                    self._mean_size,
                    self.breakers,
                    self.order,
                    self.counters,
                )
                self._of_process = client
                # Workers end by the way of multiprocessing, the others by that of atexit: both
                # come by here.
                self._at_exit = util.Finalize(
                    None, client.close, args=(_LAST_WORDS,), exitpriority=20
                )
            return self._of_process

    def _set_up(self) -> None:
        self._mutex = threading.Lock()
        self._of_process = None
        _LIVE.add(self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_mutex", "_of_process", "_at_exit", "_levels"):
            state.pop(name, None)
        return state | {"_levels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        require_redis()  # now, and not while the first batch waits
        self._set_up()


def _forget_in_child() -> None:
    for tier in list(_LIVE):
        tier._set_up()  # sockets and threads are the parent's


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True)
class PoolPlan:
    """A pool, checked, not opened yet."""

    address: PoolAddress
    wanted: Wanted
    capacity: int | None

    def open(self, *, renews: bool, takes_keys: bool) -> PoolTier:
        """Return the pool, after checking its servers, with warnings about wrong settings.

        ``renews``: whether this process renews lifetimes; one of the job is enough.
        ``takes_keys``: whether keys of the policy say what a sample is worth.
        """
        wanted = self.wanted
        tier = PoolTier(
            self.address,
            wanted.key,
            wanted.num_ids,
            wanted.data_bytes,
            self.capacity,
            mean_size=wanted.mean_size,
            takes_keys=takes_keys,
        )
        tier.renews = renews
        tier.look()
        return tier


def plan_pool(
    pool: str | None,
    pool_size: int | float | str | None,
    wanted: Wanted,
    files: Source | None,
    *,
    is_private: bool = False,
) -> PoolPlan | GroupPlan | None:
    """Return the pool as the user asked for it, or None for none.

    Without ``pool_size``, or if the servers have less, it is as large as they are together.
    ``files``: the data set's source, if what is cached are its bytes. ``is_private``: the key says
    nothing to other nodes.

    Raises :class:`~stoker.errors.ConfigError` for invalid values, and if redis-py is
    missing.
    """
    if pool is not None and pool.startswith(SOCKET):
        return plan_group(pool, pool_size, files)
    if pool is None:
        return None
    capacity = None
    if pool_size is not None:
        capacity = parse_bytes(pool_size, of=wanted.whole_bytes, name="pool_size")
    address = PoolAddress.parse(pool)
    if capacity == 0:
        return None
    if capacity is not None and capacity < wanted.largest:
        raise ConfigError(
            f"pool_size={pool_size!r} is {capacity} bytes and the largest sample has "
            f"{wanted.largest}: give it more, or leave it out"
        )
    if is_private:
        raise ConfigError(
            f"pool={str(address)!r} is invalid, as nothing tells other nodes that this is the same "
            "data set: give wrap() a name, or the decoder one"
        )
    require_redis()
    return PoolPlan(address, wanted, capacity)


@dataclass(frozen=True)
class ServerState:
    """One server of a pool."""

    name: str
    """``host:port``."""
    error: str = ""
    """Why the rest is unknown; empty if it is known."""
    version: str = ""
    memory_bytes: int = 0
    """In use, with all overhead."""
    limit_bytes: int = 0
    """Maximum bytes it may use, 0 for no limit."""
    policy: str = ""
    """``maxmemory-policy``."""
    keys: int = 0
    hits: int = 0
    """Keys asked for that were there, since it started; ``misses``: that were not."""
    misses: int = 0
    evicted: int = 0
    """Keys that left for others."""


def survey(client: PoolClient, address: PoolAddress) -> list[ServerState]:
    """Return the state of each server, within a few seconds, whatever they do."""
    deadline = time.monotonic() + _PATIENCE
    routes = client.routes(deadline)
    if routes is None:
        return [ServerState(str(address), error="no server answers")]
    calls = {name: client.start(name, [("INFO",)]) for name in routes.names}
    states = []
    for name, call in calls.items():
        if call is None or not call.wait(deadline - time.monotonic()):
            states.append(ServerState(name, error="no answer in time"))
        elif call.error is not None:
            states.append(ServerState(name, error=str(call.error)))
        else:
            states.append(_state(name, call.result[0]))
    return states


def total_room(states: Sequence[ServerState]) -> int | None:
    """Return the bytes that all servers may use; None where that is unknown or not limited."""
    if any(state.error or not state.limit_bytes for state in states):
        return None
    return sum(state.limit_bytes for state in states)


def advise(states: Sequence[ServerState], address: PoolAddress, capacity: int | None) -> list[str]:
    """Return wrong settings, each with the command that fixes it.

    ``capacity``: bytes of samples that are to fit, if that was said.
    """
    advice = []
    for state in states:
        if state.error:
            advice.append(f"{state.name} says nothing of itself: {state.error}")
            continue
        if state.policy != POLICY:
            command = _set(state.name, address, f"maxmemory-policy {POLICY}")
            advice.append(
                f"{state.name} evicts by {state.policy or 'an unknown policy'}, so that importance "
                f"does not decide which samples stay: run `{command}`"
            )
        if not state.limit_bytes:
            size = "8gb" if capacity is None else str(_each(capacity, states))
            command = _set(state.name, address, f"maxmemory {size}")
            advice.append(f"{state.name} has no limit on its memory: run `{command}`")
    room = total_room(states)
    if capacity is not None and room is not None and room < capacity:
        each = _each(capacity, states)
        commands = "; ".join(_set(state.name, address, f"maxmemory {each}") for state in states)
        advice.append(
            f"pool_size is {format_bytes(capacity)} and its servers have {format_bytes(room)} "
            f"together: ask for less, or run `{commands}`"
        )
    return advice


def _each(capacity: int, states: Sequence[ServerState]) -> int:
    """Return the limit that each server needs; they take about a fifth more than payload."""
    return int(capacity * 1.2 / len(states))


def _set(name: str, address: PoolAddress, setting: str) -> str:
    host, _, port = name.rpartition(":")
    tls = " --tls" if address.tls else ""
    user = f" --user {address.username} --askpass" if address.username else ""
    if not user and (address.password or address.password_file):
        user = " --askpass"
    return f"redis-cli -h {host.strip('[]')} -p {port}{tls}{user} CONFIG SET {setting}"


def _state(name: str, answer: Any) -> ServerState:
    if isinstance(answer, Exception):
        return ServerState(name, error=f"{answer}; let the pool's user run INFO")
    facts: dict[str, str] = {}
    for line in answer.decode(errors="replace").splitlines():
        key, _, value = line.partition(":")
        facts[key] = value
    keys = dict(part.partition("=")[::2] for part in facts.get("db0", "").split(","))
    return ServerState(
        name,
        version=facts.get("valkey_version") or facts.get("redis_version", ""),
        memory_bytes=_number(facts.get("used_memory")),
        limit_bytes=_number(facts.get("maxmemory")),
        policy=facts.get("maxmemory_policy", ""),
        keys=_number(keys.get("keys")),
        hits=_number(facts.get("keyspace_hits")),
        misses=_number(facts.get("keyspace_misses")),
        evicted=_number(facts.get("evicted_keys")),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0

"""How the servers of a pool are set up, and what to do about wrong settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.pool.pool_address import PoolAddress
from stoker.types import format_bytes

if TYPE_CHECKING:
    from stoker.pool.pool_client import PoolClient

POLICY = "volatile-ttl"
"""The eviction policy under which importance decides what stays."""

_PATIENCE = 3.0  # seconds for all servers together


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

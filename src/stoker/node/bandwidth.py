"""The fetch bandwidth that the jobs of a user share on this node, by their weights.

A queue in a file (:class:`FairQueue`) divides it among those that ask before they read
(:class:`FetchShare`).
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, StokerError
from stoker.node.owned import open_file
from stoker.node.runtime_dir import prepare_runtime_dir, runtime_dir

log = logging.getLogger("stoker")

LEASE = 5.0
"""Seconds for which a limit holds unless it is renewed."""
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000
"""Of a job that users name."""
_LOOK_AGAIN = 0.25  # seconds between two looks for a limit, where there is none
_MOST_WAITED = 60.0  # seconds after which a read begins in any case
NAME = "fetch-bandwidth"
"""The file in the runtime directory that processes share."""

HEAD = np.dtype(
    [
        ("rate", "f8"),  # bytes per second; 0: no limit
        ("until", "f8"),  # when the limit lapses
        ("free_at", "f8"),  # until when the link is used up
        ("virtual", "f8"),  # virtual time: bytes per weight
    ]
)
FLOW = np.dtype(
    [
        ("token", "u8"),  # 0: none
        ("weight", "f8"),
        ("finish", "f8"),  # virtual time at which its latest grant ends
        ("seen", "f8"),  # when it last asked
        ("is_waiting", "i8"),  # whether that was turned down
        ("granted", "f8"),  # bytes so far
    ]
)
FLOWS = 256
"""Flows that are known at a time; the one not seen for longest gives way to another."""
QUEUE_BYTES = HEAD.itemsize + FLOWS * FLOW.itemsize
"""Size of a queue's memory."""

QUANTUM = 0.005
"""Seconds of the link that are granted at least, so that many small reads take few turns."""
INSTALMENT = 0.1
"""Seconds of the link that are granted at most, so that a large read holds up no other flow."""
BURST = 0.1
"""Seconds of the link that may be made up after no flow asked."""
PRESENT = 0.1
"""Seconds for which a flow that was turned down counts as waiting; it asks again before."""
LAG = 0.25
"""Seconds of the link that a flow may be behind the others and still catch up."""
_AGAIN = 0.002  # seconds after which to ask again, if another flow is first
_LONGEST = 3600.0  # a queue that reaches further is of an earlier boot's clock


def limit_bandwidth(rate: float) -> None:
    """Limit what all jobs of this user fetch to ``rate`` bytes per second; 0: no limit.

    For :data:`LEASE` seconds. Raises :class:`OSError` and
    :class:`~stoker.errors.UntrustedPath` where the file cannot be used.
    """
    prepare_runtime_dir()
    with _opened(os.O_RDWR | os.O_CREAT) as queue:
        queue.limit(rate, time.monotonic(), LEASE)


def granted_bytes() -> dict[int, float]:
    """Return the bytes granted so far by token, of jobs that asked while there was a limit."""
    try:
        with _opened(os.O_RDWR) as queue:
            flows = queue.flows[queue.flows["token"] > 0]
            return dict(zip(flows["token"].tolist(), flows["granted"].tolist(), strict=True))
    except (OSError, StokerError):
        return {}


@dataclass
class FetchShare:
    """A job's share of the fetch bandwidth: what its processes ask before they read.

    The job ``token`` gets ``weight`` / the weights of all jobs that fetch at the time. A process
    takes some bytes at once, reads while it has any left, and pays for what it read. Where no
    limit is in force, or the file cannot be used, it waits for nothing. Picklable, and safe in any
    thread: each process has a balance of its own. A killed process leaves nothing locked.
    """

    token: int
    """The job's, the same in all its processes; 0: it never waits."""
    weight: float = 1.0
    _balance: float = field(default=0.0, init=False, repr=False)
    _free_until: float = field(default=-math.inf, init=False, repr=False)  # no limit before

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"weight={self.weight!r} is invalid: give a number above 0")

    def __getstate__(self) -> tuple[int, float]:
        return self.token, self.weight

    def __setstate__(self, state: tuple[int, float]) -> None:
        self.token, self.weight = state
        self._balance, self._free_until = 0.0, -math.inf

    def seconds_to_wait(self) -> float:
        """Return 0 if a read may begin, else for how long to wait before asking again."""
        now = time.monotonic()
        if not self.token or now < self._free_until:
            return 0.0
        while self._balance <= 0:
            granted, wait = self._ask(now)
            if granted == math.inf:
                self._balance, self._free_until = 0.0, now + _LOOK_AGAIN
                return 0.0
            if not granted:
                return wait
            self._balance += granted
        return 0.0

    def spend(self, num_bytes: int) -> None:
        """Pay for a read that begins."""
        if self.token and time.monotonic() >= self._free_until:
            self._balance -= num_bytes

    def wait(self, num_bytes: int) -> None:
        """Wait until a read of so many bytes may begin, and pay for it."""
        deadline = time.monotonic() + _MOST_WAITED
        while (seconds := self.seconds_to_wait()) and time.monotonic() < deadline:
            time.sleep(seconds)
        self.spend(num_bytes)

    def _ask(self, now: float) -> Turn:
        try:
            with _opened(os.O_RDWR) as queue:
                return queue.ask(self.token, self.weight, 1.0 - self._balance, now)
        except FileNotFoundError:
            pass
        except (OSError, StokerError) as error:
            log.info("fetch bandwidth is not shared: %s", error)
        return Turn(math.inf, 0.0)


@contextmanager
def _opened(flags: int) -> Iterator[FairQueue]:
    """Return the queue for this thread alone, and write it back."""
    path: Path = runtime_dir() / NAME
    fd = open_file(path, flags)
    try:
        # Another thread's descriptor is another lock holder too, so this excludes threads.
        fcntl.flock(fd, fcntl.LOCK_EX)
        memory = np.zeros(QUEUE_BYTES, np.uint8)
        stored = np.frombuffer(os.pread(fd, QUEUE_BYTES, 0), np.uint8)
        memory[: len(stored)] = stored
        yield FairQueue(memory)
        os.pwrite(fd, memory.tobytes(), 0)
    finally:
        os.close(fd)


class Turn(NamedTuple):
    """What came of asking."""

    granted: float
    """Bytes, more than were asked for or a part of them; 0: not yet; inf: there is no limit."""
    wait: float
    """Seconds after which to ask again, if nothing was granted."""


class FairQueue:
    """Grants bytes of a link to flows in proportion to their weights, if they ask for them.

    Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996): a grant of ``n`` bytes to a flow of
    weight ``w`` starts at S = max(its last finish F, virtual time v), and then F = S + n / w; of
    the flows that wait, the one with the least S is next. A flow that does not wait holds up no
    other, so the whole link is used while any flow asks. As flows poll, v lags :data:`LAG` seconds
    of the link behind what was granted last: a flow that asks a little late loses nothing, and one
    that was idle makes up no more than that.

    ``memory`` is u8[:data:`QUEUE_BYTES`], zeros for a new queue. No clock is read here; the caller
    keeps other processes from the memory meanwhile.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._head = memory[: HEAD.itemsize].view(HEAD)
        self.flows = memory[HEAD.itemsize : QUEUE_BYTES].view(FLOW)
        """The flows, :data:`FLOW` each; those with a token of 0 are none."""

    def limit(self, rate: float, now: float, seconds: float) -> None:
        """Limit the link to ``rate`` bytes per second for so many ``seconds``; 0: no limit."""
        self._head["rate"], self._head["until"] = rate, now + seconds

    def rate(self, now: float) -> float:
        """Return the bytes per second in force; 0: no limit."""
        rate, until = float(self._head["rate"][0]), float(self._head["until"][0])
        return rate if now < until < now + _LONGEST else 0.0

    def ask(self, token: int, weight: float, num_bytes: float, now: float) -> Turn:
        """Ask for ``num_bytes`` for the flow ``token``, whose weight is ``weight`` from now on."""
        rate = self.rate(now)
        if not rate:
            return Turn(np.inf, 0.0)
        own = self._row(token, now)
        own["weight"], own["seen"], own["is_waiting"] = weight, now, 1
        head = self._head[0]
        if head["free_at"] > now + _LONGEST:
            head["free_at"] = now
        if head["free_at"] > now:
            return Turn(0.0, min(float(head["free_at"]) - now, PRESENT / 3))
        start = max(float(own["finish"]), float(head["virtual"]))
        if self._is_other_first(token, start, now):
            return Turn(0.0, _AGAIN)
        granted = min(max(num_bytes, rate * QUANTUM), rate * INSTALMENT)
        own["finish"], own["is_waiting"] = start + granted / weight, 0
        own["granted"] += granted
        head["free_at"] = max(float(head["free_at"]), now - BURST) + granted / rate
        behind = rate * LAG / float(self.flows["weight"][self._are_present(now)].sum())
        head["virtual"] = max(float(head["virtual"]), start - behind)
        return Turn(granted, 0.0)

    def _is_other_first(self, token: int, start: float, now: float) -> bool:
        flows = self.flows
        waiting = self._are_present(now) & (flows["is_waiting"] > 0) & (flows["token"] != token)
        starts = np.maximum(flows["finish"][waiting], self._head["virtual"][0])
        return bool((starts < start).any())

    def _are_present(self, now: float) -> NDArray[np.bool_]:
        age = now - self.flows["seen"]
        return np.asarray((self.flows["token"] > 0) & (age >= 0) & (age < PRESENT))

    def _row(self, token: int, now: float) -> np.void:
        """Return the row of a flow, which takes that of the one longest gone if it is new."""
        found = np.flatnonzero(self.flows["token"] == token)
        if found.size:
            row: np.void = self.flows[found[0]]
            return row
        # What was seen later than now is of an earlier boot.
        seen = np.where(self.flows["seen"] > now, 0.0, self.flows["seen"])
        row = self.flows[int(np.argmin(np.where(self.flows["token"] > 0, seen, -1.0)))]
        row["token"], row["finish"], row["granted"] = token, 0.0, 0.0
        return row

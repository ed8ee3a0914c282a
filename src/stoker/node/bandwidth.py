"""The fetch bandwidth that the jobs of a user share on this node, by their weights."""

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

import numpy as np

from stoker.errors import ConfigError, StokerError
from stoker.node.fair_queue import QUEUE_BYTES, FairQueue, Turn
from stoker.node.owned import open_file
from stoker.node.runtime_dir import prepare_runtime_dir, runtime_dir

log = logging.getLogger("stoker")

LEASE = 5.0
"""Seconds for which a limit holds unless it is renewed."""
_LOOK_AGAIN = 0.25  # seconds between two looks for a limit, where there is none
_MOST_WAITED = 60.0  # seconds after which a read begins in any case
NAME = "fetch-bandwidth"
"""The file in the runtime directory that processes share."""


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

"""The training process's side of prefetch: starts the process, feeds it, and starts it again."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.prefetch.channel import ALIVE_EVERY, Channel, pid_namespace
from stoker.prefetch.job import Job, dump
from stoker.prefetch.marks import Marks
from stoker.shared import SharedArray
from stoker.store import unforked
from stoker.store.ofd import try_lock
from stoker.store.runtime_dir import prepare_runtime_dir

log = logging.getLogger("stoker")

_SILENCE = 3.0  # seconds without a sign of life after which the process counts as hung
_PATIENCE = 10.0  # seconds for a process that is starting
_MOST_STARTS = 5  # in a row, each soon after the one before
_SOON = 30.0


class _Published(NamedTuple):
    """One epoch, as it is told to the process, and told again to one that replaces it."""

    epoch: int
    ids: SharedArray
    marks: SharedArray
    generation: int
    keys: SharedArray | None


class Prefetcher:
    """Keeps the prefetch process of this node walking ahead of one rank.

    ``key`` names the arena: all ranks and jobs of this user that share it share the process too.
    ``job`` is what the process needs if it has to be started, ``window_bytes`` how much may lie
    ready for this rank, and ``fresh`` (``u8[N]``) gets 1 at samples that were read for an access
    still to come. A process that dies or hangs is replaced, with one warning; reading goes on
    without it meanwhile. When it cannot be started at all (the source cannot be pickled, its
    class lives in ``__main__``), that is logged and nothing is prefetched.

    Used by one thread; another one, its own, watches. In a forked child it does nothing.
    """

    def __init__(
        self, key: str, job: Callable[[], Job], window_bytes: int, fresh: SharedArray
    ) -> None:
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        folder = prepare_runtime_dir()
        self._socket, self._lock = folder / f"{name}.feed", folder / f"{name}.feeder"
        self._make_job = job
        self._window_bytes = window_bytes
        self._fresh = fresh
        self._segments: list[_Published] = []
        self._mutex = threading.Lock()
        self._channel: Channel | None = None
        self._starts: list[float] = []
        self._warned = self._given_up = False
        self._generation = unforked.generation()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="stoker-prefetch", daemon=True)
        self._thread.start()

    def publish(
        self,
        epoch: int,
        ids: NDArray[np.uint32],
        marks: SharedArray,
        keys: NDArray[np.float64] | None = None,
    ) -> None:
        """Append an epoch's accesses ``u32[A]``; ``marks`` is the memory of its :class:`Marks`."""
        segment = _Published(
            epoch,
            SharedArray.copy_of(np.ascontiguousarray(ids, np.uint32)),
            marks,
            Marks(marks.array).generation,
            None if keys is None else SharedArray.copy_of(np.asarray(keys, np.float64)),
        )
        with self._mutex:
            self._segments = [*self._segments[-1:], segment]
            self._tell(self._order(segment))

    def reset(self) -> None:
        """Forget what was published: the rank goes elsewhere."""
        with self._mutex:
            self._segments = []
            self._tell(({"order": "reset"}, []))

    def close(self) -> None:
        """Disconnect; the process ends when nobody else needs it. May be called again."""
        if self._generation != unforked.generation() or not self._thread.is_alive():
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()

    # --- telling ---

    def _tell(self, order: tuple[dict[str, object], list[int]]) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):  # the watching thread notices and starts anew
                self._channel.send(*order)

    @staticmethod
    def _order(segment: _Published) -> tuple[dict[str, object], list[int]]:
        fds = [segment.ids.fileno(), segment.marks.fileno()]
        if segment.keys is not None:
            fds.append(segment.keys.fileno())
        order = {
            "order": "segment",
            "epoch": segment.epoch,
            "length": len(segment.ids.array),
            "generation": segment.generation,
        }
        return order, fds

    # --- watching ---

    def _watch(self) -> None:
        try:
            while self._connect() and self._listen():
                self._complain()
        except Exception as error:
            # Nothing of this may reach the training loop: it reads without us.
            log.warning("samples are not prefetched any more: %r", error)
        finally:
            with self._mutex:
                self._drop()
                self._expect_nothing()
            os.close(self._wake)

    def _expect_nothing(self) -> None:
        """Let workers read for themselves at once."""
        for segment in self._segments:
            Marks(segment.marks.array).attend(0.0)

    def _complain(self) -> None:
        with self._mutex:
            self._expect_nothing()
        if not self._warned:
            self._warned = True
            log.warning("the prefetch process died or hung: workers read, and it is started again")

    def _listen(self) -> bool:
        """Return True when the process is dead or hung, False when it is time to stop."""
        assert self._channel is not None
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._channel.fileno(), select.POLLIN)
        heard = time.monotonic()
        limit = _PATIENCE
        pid = 0
        while True:
            ready = dict(poll.poll(ALIVE_EVERY * 1000))
            if self._wake in ready:
                return False
            if ready:
                try:
                    received = self._channel.receive()
                except OSError:
                    return True
                if received is None:
                    return True
                pid = _pid_here(received[0])
                heard, limit = time.monotonic(), _SILENCE
            elif time.monotonic() - heard > limit:
                if pid:  # so that its claims are free
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                return True

    # --- connecting ---

    def _connect(self) -> bool:
        """Connect to the process, started if need be; False if that is of no use."""
        with self._mutex:
            self._drop()
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if self._stopping(0.0):
                return False
            with unforked.no_fork, contextlib.suppress(OSError):
                channel = unforked.keep(Channel.connect(self._socket))
                with self._mutex:
                    self._channel = channel
                    self._introduce(channel)
                return True
            if not self._start():
                return False
            if self._stopping(0.02):
                with contextlib.suppress(OSError):  # it need not wait for its first rank
                    Channel.connect(self._socket).close()
                return False
        log.warning("the prefetch process does not answer: workers read for themselves")
        return False

    def _introduce(self, channel: Channel) -> None:
        channel.send({"order": "join", "window_bytes": self._window_bytes}, [self._fresh.fileno()])
        for segment in self._segments:
            channel.send(*self._order(segment))

    def _stopping(self, seconds: float) -> bool:
        return bool(select.select([self._wake], [], [], seconds)[0])

    def _start(self) -> bool:
        """Start the process unless there is one; False if it cannot be."""
        with unforked.no_fork:
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if not try_lock(lock):
                    return True  # another rank has started it just now
                now = time.monotonic()
                self._starts = [t for t in self._starts if now - t < _SOON] + [now]
                if len(self._starts) > _MOST_STARTS:
                    log.warning("the prefetch process dies again and again: it is left alone")
                    return False
                return _spawn(self._make_job, self._socket, lock)
            finally:
                os.close(lock)

    def _drop(self) -> None:
        if self._channel is not None:
            unforked.drop(self._channel)
            self._channel = None


def _pid_here(message: dict[str, Any]) -> int:
    """Return the process that sent a sign of life; 0 when its number means nothing here."""
    return int(message.get("pid", 0)) if message.get("namespace") == pid_namespace() else 0


def _spawn(make_job: Callable[[], Job], path: Path, lock: int) -> bool:
    """Start the process with copies of what it needs; False if the job cannot be passed on."""
    try:
        pickled, fds = dump(make_job())
    except (pickle.PicklingError, TypeError, AttributeError, StokerError) as error:
        log.info("samples are not prefetched, workers read them: %s", error)
        return False
    listener = Channel.listen(path)
    job_fd = os.memfd_create("stoker-job", os.MFD_CLOEXEC)
    try:
        os.write(job_fd, pickled)
        os.lseek(job_fd, 0, os.SEEK_SET)
        inherited = [job_fd, listener.fileno(), lock]
        subprocess.run(
            [sys.executable, "-m", "stoker.prefetch.process", *map(str, inherited)],
            pass_fds=[*inherited, *fds],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
            timeout=_PATIENCE,
            check=True,
        )
    finally:
        listener.close()
        for fd in (job_fd, *fds):
            os.close(fd)
    return True

"""Keeps a process of Stoker's own beside others that share it: starts it, and starts it again."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from stoker._core import BUILD
from stoker.errors import StokerError
from stoker.node import child, descriptors
from stoker.node.child import Surroundings
from stoker.node.hosting import Given, hand_over, started_by_service
from stoker.node.locks import try_lock, try_lock_file
from stoker.node.messages import Channel
from stoker.node.owned import open_file
from stoker.node.runtime_dir import prepare_runtime_dir
from stoker.node.supervised import ALIVE_EVERY, lock_of, pid_namespace, write_holder

log = logging.getLogger("stoker")

_SILENCE = 3.0  # seconds without a sign of life after which a process counts as hung,
_PATIENCE = 30.0  # but so many if it is starting, or gets on: the machine may be busy
_MOST_STARTS = 5  # within so many seconds; then there is a pause as long
_SOON = 30.0
_RETRY = 0.02  # seconds between two attempts to connect
_GLANCE = 0.002  # seconds between two looks at whether a process has come up


def start_unless_alive(
    module: str,
    path: Path,
    lock_path: Path,
    job: Callable[[], object],
    *,
    base: Mapping[str, str] = os.environ,
    log_file: Path | None = None,
    asks_service: bool = False,
    forerunner: Forerunner | None = None,
) -> subprocess.Popen[bytes] | None:
    """Start the process that listens at ``path``; None if one lives, or has just ended.

    It holds the lock on the file at ``lock_path`` as long as it lives, and gets ``job()``;
    :func:`~stoker.node.supervised.go_to_background` is its other half. ``base`` is its environment,
    and what it prints goes to ``log_file`` if given. With ``asks_service`` the user's service
    starts it if it can: then None is returned as well. A ``forerunner`` becomes it, if one is
    given. Raises :class:`OSError`, and what ``job`` and pickling do.
    """
    lock = try_lock_file(lock_path)
    if lock is None:
        return None
    try:
        if not os.fstat(lock.fileno()).st_nlink:
            return None
        os.ftruncate(lock.fileno(), 0)  # what was written of the one before
        with child.dumped(job()) as given:
            listener = Channel.listen(path)
            try:
                what = Given(given, path, listener.fileno(), lock.fileno())
                if forerunner is not None:
                    return forerunner.become(what)
                if asks_service and _start_by_service(module, base, what):
                    return None
                with _opened(log_file) as output:
                    return Forerunner(module, base, output).become(what)
            finally:
                descriptors.drop(listener)
    finally:
        descriptors.drop(lock)


def kill_holder(lock_path: Path) -> None:
    """End the process that :func:`start_unless_alive` started with this lock, if it holds it.

    Nothing happens if it is of another pid namespace, where its number means another process.
    """
    with descriptors.no_fork, contextlib.suppress(OSError):
        lock = open_file(lock_path, os.O_RDWR)
        try:
            if not try_lock(lock):  # so it lives, and the number is still its own
                pid, _, namespace = os.read(lock, 64).partition(b" ")
                if namespace == b"%d" % pid_namespace():
                    os.kill(int(pid), signal.SIGKILL)
        finally:
            os.close(lock)


def _start_by_service(module: str, base: Mapping[str, str], what: Given) -> bool:
    """Have the process started elsewhere; False if it is not, and never will be."""
    started = started_by_service(module, base)
    if started is None:
        return False
    with contextlib.closing(started.channel):
        try:
            hand_over(started.channel, what)
        except OSError as error:
            log.info("what the service of this node started is gone: %s", error)
            return False
    write_holder(what.lock, started.pid)  # it may hang before it does so itself
    return True


class Forerunner:
    """A process that comes up while what it is to do is still being made.

    It calls ``main()`` of ``module``, and waits there for what
    :func:`~stoker.node.supervised.go_to_background` returns. ``base`` is its environment, and what
    it prints goes to ``output`` if given. To be closed, unless it becomes the process of a job; in
    a forked child that does nothing. One thread at a time. Raises :class:`OSError`.
    """

    def __init__(
        self,
        module: str,
        base: Mapping[str, str] = os.environ,
        output: IO[bytes] | None = None,
    ) -> None:
        self._generation = descriptors.generation()
        self._is_used = False
        with descriptors.no_fork:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channel = Channel(descriptors.keep(ours))
            with theirs:  # closed before it is given anything, or we would not see that it ended
                number = theirs.fileno()
                around = Surroundings.own(base)
                try:
                    self._process = child.start(
                        module,
                        number,
                        fds=[number],
                        surroundings=around,
                        output=output,
                        detached=True,
                    )
                except BaseException:
                    self._channel.close()
                    raise

    def become(self, what: Given) -> subprocess.Popen[bytes]:
        """Give it a job, with all that it needs for it, and return it; once."""
        self._is_used = True
        # It may have ended by now, or end without what it needs.
        with contextlib.closing(self._channel), contextlib.suppress(OSError):
            hand_over(self._channel, what)
        return self._process

    def close(self) -> None:
        """End it if it has no job. May be called again."""
        if not self._is_used and self._generation == descriptors.generation():
            self._is_used = True
            self._channel.close()
            self._process.kill()
            self._process.wait()


def _opened(log_file: Path | None) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    return contextlib.nullcontext() if log_file is None else log_file.open("wb")


class Silence:
    """How long a process has said nothing that should do so every ``ALIVE_EVERY`` seconds.

    It counts as hung after 3 s; but after 30 s before its first word, and while it gets on: a
    thread of it runs, waits for a processor or for a disk, or it used processor time since the
    last look. One that is stopped, or waits for what never comes, does none of that. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._since = time.monotonic()
        self._look_at = self._since + _PATIENCE
        self._used: int | None = None  # at the last look

    def end(self, pid: int) -> None:
        """Note that process ``pid`` has said something; 0: its number means nothing here."""
        self._pid, self._used = pid, None
        self._since = time.monotonic()
        self._look_at = self._since + _SILENCE

    def is_hung(self) -> bool:
        """Whether the process counts as hung; to be asked now and then."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        if not self._pid or now - self._since >= _PATIENCE:
            return True
        before, (self._used, is_busy) = self._used, _doings(self._pid)
        self._look_at = now + ALIVE_EVERY
        return not is_busy and before == self._used


def _doings(pid: int) -> tuple[int, bool]:
    """Return the processor time that a process has used, in ticks, and whether a thread is busy.

    That is one which runs, would run if it had a processor, or waits for a disk.
    """
    used, is_busy = 0, False
    with contextlib.suppress(OSError):  # it is gone
        for thread in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                stat = Path(thread.path, "stat").read_text().rpartition(")")[2].split()
                used += int(stat[11]) + int(stat[12])  # utime, stime
                is_busy = is_busy or stat[0] in "RD"
    return used, is_busy


class Supervisor:
    """A connection to a process that all ranks of a node share, started by the first of them.

    ``main()`` of ``module`` is that process, with descriptors of the pickled ``job()``, of the
    socket and of the lock, and with the socket's path as arguments
    (:func:`~stoker.node.supervised.run` takes them). It is shared by all of this build of Stoker
    who give the same ``key``, and called ``what`` in the log. ``introduce`` tells a process that is
    new to this rank all it must know; it is called with :attr:`mutex` held. ``heard`` gets its
    signs of life and what else they say, in a thread of the supervisor's, and ``lost`` is called
    there when there is no such process any more, with :attr:`mutex` held.

    A process that dies or hangs is replaced, with one warning. When it cannot be started at all
    (something of the job cannot be pickled, a class of it lives in ``__main__``), that is logged.
    Whatever happens, nothing is raised: training continues without it. In a forked child it does
    nothing. A ``forerunner`` of ``module`` becomes the process if there is none yet, and is ended
    otherwise.
    """

    def __init__(
        self,
        what: str,
        module: str,
        key: str,
        job: Callable[[], object],
        introduce: Callable[[Channel], None],
        heard: Callable[[dict[str, Any]], None] = lambda message: None,
        lost: Callable[[], None] = lambda: None,
        forerunner: Forerunner | None = None,
    ) -> None:
        self._what, self._module = what, module
        self._forerunner = forerunner
        # What one version of Stoker started obeys no other.
        own = hashlib.sha256(f"{BUILD['version']} {BUILD['commit']} {key}".encode())
        self._name = f"{own.hexdigest()[:24]}.{what}"
        self._make_job, self._introduce = job, introduce
        self._heard, self._lost = heard, lost
        self.mutex = threading.Lock()
        """Held while what ``introduce`` tells is changed, and around :meth:`tell`."""
        self._channel: Channel | None = None
        self._starts: list[float] = []
        self._warned = False
        self._generation = descriptors.generation()
        self._is_over = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name=f"stoker-{what}", daemon=True)
        self._thread.start()

    def tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message with copies of descriptors, if the process is running."""
        if self._channel is not None:
            with contextlib.suppress(OSError):  # the watching thread notices and restarts it
                self._channel.send(message, fds)

    def close(self) -> None:
        """Disconnect; the process ends when no other process needs it. May be called again."""
        if self._generation != descriptors.generation() or not self._thread.is_alive():
            return
        with self.mutex:
            if not self._is_over:
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    # --- watching ---

    def _watch(self) -> None:
        try:
            folder = prepare_runtime_dir()
            self._socket, self._lock = folder / self._name, lock_of(folder / self._name)
            while self._connect() and self._listen():
                with self.mutex:
                    self._lost()
                self._complain()
        except Exception as error:
            # Nothing of this may reach the training loop: it reads without us.
            log.warning("%s is not available, workers read: %r", self._what, error)
        finally:
            self._end_forerunner()
            with self.mutex:
                self._drop()
                self._lost()
                self._is_over = True  # the thread may still be alive when close() looks
                os.close(self._wake)
                # What they belong to has the supervisor: so it is freed at once, with what it maps.
                self._make_job = self._introduce = self._heard = self._lost = _do_nothing

    def _complain(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "the %s process died or hung: workers read, and it is started again", self._what
            )

    def _listen(self) -> bool:
        """Return True when the process is dead or hung, False when it is time to stop."""
        assert self._channel is not None
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._channel.fileno(), select.POLLIN)
        silence = Silence()
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
                self._heard(received[0])
                silence.end(_pid_here(received[0]))
            elif silence.is_hung():
                kill_holder(self._lock)  # so that its claims are free
                return True

    # --- connecting ---

    def _connect(self) -> bool:
        """Connect to the process, starting it if necessary; False if that is useless."""
        what = self._what
        with self.mutex:
            self._drop()
        self._deadline = time.monotonic() + _PATIENCE
        while not self._stopping(0.0):
            with contextlib.suppress(OSError):
                channel = Channel.connect(self._socket)
                # No fork meanwhile: a child would have the mutex held for good.
                with descriptors.no_fork, self.mutex:
                    self._drop()
                    self._channel = channel
                    self._introduce(channel)
                self._end_forerunner()
                return True
            if time.monotonic() >= self._deadline:
                log.warning("the %s process does not answer: workers read for themselves", what)
                return False
            if self._dies_often():
                log.warning("the %s process keeps dying: pausing", what)
                if self._stopping(_SOON):
                    return False
                self._starts = []
                self._deadline = time.monotonic() + _PATIENCE
            is_up = self._start()
            if is_up is None:
                return False
            if self._stopping(0.0 if is_up else _RETRY):
                with contextlib.suppress(OSError):  # it need not wait for its first rank
                    Channel.connect(self._socket).close()
                return False
        return False

    def _stopping(self, seconds: float) -> bool:
        poll = select.poll()  # not select(), which fails for descriptors above 1,023
        poll.register(self._wake, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _start(self) -> bool | None:
        """Start the process unless there is one, and return whether it has come up.

        None if it cannot be started at all.
        """
        begin = time.monotonic()
        try:
            # What died soon after its start is not left to the service again.
            process = start_unless_alive(
                self._module,
                self._socket,
                self._lock,
                self._job,
                asks_service=not self._starts,
                forerunner=self._forerunner,
            )
        except (pickle.PicklingError, TypeError, AttributeError, StokerError) as error:
            log.info("there is no %s of samples, workers read them: %s", self._what, error)
            return None
        finally:
            self._end_forerunner()
        self._deadline += time.monotonic() - begin  # what the service takes is not held against it
        # Nothing of it is open here any more: workers may be forked while it comes up.
        return process is not None and self._await_up(process)

    def _job(self) -> object:
        """Return what the process is given; called when there is none, just before the start."""
        self._starts.append(time.monotonic())
        return self._make_job()

    def _await_up(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the process has put itself into the background; False if it did not."""
        deadline = time.monotonic() + _PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_GLANCE)  # wait(timeout) would look every 50 ms in the end
        if process.returncode is None:
            process.kill()
        failed = process.wait()
        if failed:
            log.info("the %s process did not start: it exited with %d", self._what, failed)
        return not failed

    def _dies_often(self) -> bool:
        now = time.monotonic()
        self._starts = [at for at in self._starts if now - at < _SOON]
        return len(self._starts) >= _MOST_STARTS

    def _end_forerunner(self) -> None:
        """End it, unless it has become the process: another one lives."""
        forerunner, self._forerunner = self._forerunner, None
        if forerunner is not None:
            forerunner.close()

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _do_nothing(*_: object) -> None: ...


def _pid_here(message: dict[str, Any]) -> int:
    """Return the process that sent a sign of life; 0 when its number means nothing here."""
    return int(message.get("pid", 0)) if message.get("namespace") == pid_namespace() else 0

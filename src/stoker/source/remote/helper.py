"""Runs an engine in a process of its own, so that its client never meets a fork."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

import numpy as np

from stoker.node import child, descriptors
from stoker.shared import SharedArray
from stoker.source.pace import Pace
from stoker.source.packed import Bytes
from stoker.source.remote.backend import Location
from stoker.source.remote.engine import Engine
from stoker.source.remote.request import Outage

_log = logging.getLogger("stoker")
_SIGN_OF_LIFE = 5.0  # seconds
_LONGEST_REQUEST = 330.0  # seconds: what one request may take, by the clients' own timeouts
_helpers: weakref.WeakSet[Helper] = weakref.WeakSet()
# Held while a socket exists that a child must not keep and that is not registered yet.
_no_fork = threading.RLock()


@dataclass(frozen=True)
class Raised:
    """An exception that a call ended with, on its way to the caller."""

    error: Exception


@dataclass(frozen=True)
class Note:
    """A line for the caller's log, sent before the answer."""

    text: str


# --- the helper process: an engine, and a thread for each call that is under way ---


def main() -> None:
    """Serve calls until the process at the other end of the socket ends; does not return.

    The argument is the descriptor of the socket.
    """
    # Ctrl-C at a terminal goes to all processes of the group; this one ends with its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    server = _Server()
    threading.Thread(target=server.show_life, daemon=True).start()
    while True:
        message, fds, flags, _ = socket.recv_fds(control, 16, 2)
        if not message:
            # No tidying up: threads inside a native client must not meet the interpreter's end.
            os._exit(0)
        if flags & socket.MSG_CTRUNC:  # no descriptors left here: the caller hears that it failed
            _close(fds)
            continue
        threading.Thread(target=server.serve, args=(fds,), daemon=True).start()


class _Call:
    """The connection to a caller who waits, and what else was sent along."""

    def __init__(self, fds: list[int]) -> None:
        self.into = mmap.mmap(fds[1], 0) if len(fds) > 1 else None
        self._talk: connection.Connection[Any, Any] = connection.Connection(fds[0])
        self._sending = threading.Lock()
        self._is_answered = False
        _close(fds[1:])

    def question(self) -> tuple[str, tuple[Any, ...]]:
        """Return the method that is called, and its arguments."""
        method, arguments = pickle.loads(self._talk.recv_bytes())
        return method, arguments

    def answer(self, message: bytes) -> None:
        """Send the answer, which is the last message."""
        with self._sending:
            self._is_answered = True
            self._send(message)

    def tell(self, message: bytes) -> bool:
        """Send a note, or a sign of life, which is empty; return whether the caller gets it."""
        with self._sending:
            return not self._is_answered and self._send(message)

    def _send(self, message: bytes) -> bool:
        try:
            self._talk.send_bytes(message)
        except OSError:  # the caller is gone
            return False
        return True

    def close(self) -> None:
        """Hang up."""
        with self._sending:
            self._talk.close()


class _Server:
    """Answers calls."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._calls: set[_Call] = set()

    def serve(self, fds: list[int]) -> None:
        """Answer one call: ``fds`` is its connection and, for a fetch, the memory to fill."""
        try:
            call = _Call(fds)
        except OSError:  # no memory left to map
            _close(fds)
            return
        self._calls.add(call)
        try:
            call.answer(_pickled(self._answer(call)))
        except EOFError:
            pass
        finally:
            self._calls.discard(call)
            call.close()

    def _answer(self, call: _Call) -> Any:
        method, arguments = call.question()
        try:
            return self._do(method, arguments, call.into)
        except Exception as error:
            return Raised(error)

    def _do(self, method: str, arguments: tuple[Any, ...], into: mmap.mmap | None) -> Any:
        if method == "open":
            location, pace = arguments
            self._engine = Engine(location, pace, Outage.over(into), self._note)
            return None
        if self._engine is None:
            raise RuntimeError("a call came before open")
        if into is not None:
            with memoryview(into) as memory:
                return self._engine.fetch(arguments[0], memory)
        if method == "tally":
            return replace(self._engine.tally)
        return getattr(self._engine, method)(*arguments)

    def _note(self, text: str) -> None:
        """Have one of the callers log a line: they are threads of one process."""
        note = _pickled(Note(text))
        for call in list(self._calls):
            if call.tell(note):
                return

    def show_life(self) -> None:
        """Tell everyone who waits, every few seconds, that there is progress, if there is."""
        told = None
        while True:
            threading.Event().wait(_SIGN_OF_LIFE)
            now = replace(self._engine.tally) if self._engine is not None else None
            if now != told:
                told = now
                for call in list(self._calls):
                    call.tell(b"")


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _pickled(answer: Any) -> bytes:
    try:
        return pickle.dumps(answer, protocol=5)
    except Exception as error:
        return pickle.dumps(Raised(RuntimeError(f"{answer!r} does not pickle: {error}")))


# --- the process that uses it ---


class HelperDied(Exception):
    """The helper process ended, or stopped making progress and was killed."""


class Helper:
    """A process that serves the calls of this one, and ends when this one does.

    Started by exec, so it inherits nothing but one socket: no lock, no thread, no ``__main__``.
    Each call has a connection of its own, so threads do not wait for each other, and its bytes
    come in memory that both processes map. Thread-safe. Of no use in a forked child, whose copy
    of the socket is closed right after the fork.
    """

    def __init__(self, location: Location, pace: Pace, outage: Outage) -> None:
        """Start the process and let it open ``location``.

        Raises what opening it raises, and :class:`HelperDied` when the process does not start.
        """
        self._patience = pace.retry.deadline + _LONGEST_REQUEST
        with descriptors.no_fork:
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control = descriptors.keep(control)
            with theirs:
                number = theirs.fileno()
                self._process = child.start("stoker.source.remote.helper", number, fds=[number])
            self._stop = weakref.finalize(
                self, _stop, control, self._process, descriptors.generation()
            )
        try:
            self._call("open", (location, pace), outage.shared)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what ``method`` of the engine returns; raises HelperDied."""
        return self._call(method, arguments, None)

    def fetch(self, wanted: Any, num_bytes: int) -> tuple[Bytes, Any]:
        """Return ``(data u8[num_bytes], failures)`` of :meth:`Engine.fetch`; raises HelperDied."""
        shared = SharedArray.create(num_bytes, np.uint8, "fetched")
        return shared.array, self._call("fetch", (wanted,), shared)

    def _call(self, method: str, arguments: tuple[Any, ...], into: SharedArray | None) -> Any:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            talk = connection.Connection(ours.detach())
            try:
                with talk:
                    fds = [theirs.fileno(), *([into.fileno()] if into is not None else [])]
                    socket.send_fds(self._control, [b"call"], fds)
                    theirs.close()
                    talk.send_bytes(pickle.dumps((method, arguments), protocol=5))
                    answer = self._answer(talk)
            except (EOFError, OSError) as error:
                raise HelperDied(f"the process that reads from storage ended: {error}") from error
        if isinstance(answer, Raised):
            raise answer.error
        return answer

    def _answer(self, talk: connection.Connection[Any, Any]) -> Any:
        """Return the answer; before it come notes for the log, and signs of life, empty ones."""
        while talk.poll(self._patience):
            answer = pickle.loads(message) if (message := talk.recv_bytes()) else Note("")
            if not isinstance(answer, Note):
                return answer
            if answer.text:
                _log.warning("%s", answer.text)
        self.close()
        raise HelperDied(f"the process that reads from storage hung for {self._patience:.0f} s")

    def close(self) -> None:
        """End the process; calls under way fail. May be called again."""
        self._stop()


def _stop(control: socket.socket, process: subprocess.Popen[bytes], generation: int) -> None:
    """End the process: it goes by itself when its socket closes, or is killed a second later."""
    descriptors.drop(control)
    if generation != descriptors.generation():  # a forked child's copy: only the parent can wait
        process.returncode = 0  # else the object would warn when it goes
        return
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()

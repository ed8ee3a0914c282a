"""What the helper process runs: an engine, and a thread for each call that is under way."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import sys
import threading
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

from stoker.source.remote.engine import Engine
from stoker.source.remote.outage import Outage

_SIGN_OF_LIFE = 5.0  # seconds


@dataclass(frozen=True)
class Raised:
    """An exception that a call ended with, on its way to the caller."""

    error: Exception


@dataclass(frozen=True)
class Note:
    """A line for the caller's log, sent before the answer."""

    text: str


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
            place, pace = arguments
            self._engine = Engine(place, pace, Outage.over(into), self._note)
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

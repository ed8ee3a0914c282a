"""Runs an engine in a process of its own, so that its client never meets a fork."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import threading
import weakref
from multiprocessing import connection
from typing import Any

import numpy as np

from stoker import child
from stoker.shared import SharedArray
from stoker.source.pace import Pace
from stoker.source.packed import Bytes
from stoker.source.remote.backend import Place
from stoker.source.remote.helper_main import Note, Raised
from stoker.source.remote.outage import Outage

_log = logging.getLogger("stoker")
_LONGEST_REQUEST = 330.0  # seconds: what one request may take, by the clients' own timeouts


class HelperDied(Exception):
    """The helper process ended, or stopped making progress and was killed."""


class Helper:
    """A process that serves the calls of this one, and ends when this one does.

    Started by exec, so it inherits nothing but one socket: no lock, no thread, no ``__main__``.
    Each call has a connection of its own, so threads do not wait for each other, and its bytes
    come in memory that both processes map. Thread-safe. Of no use in a forked child, whose copy
    of the socket is closed right after the fork.
    """

    def __init__(self, place: Place, pace: Pace, outage: Outage) -> None:
        """Start the process and let it open ``place``.

        Raises what opening it raises, and :class:`HelperDied` when the process does not start.
        """
        self._patience = pace.retry.deadline + _LONGEST_REQUEST
        with _no_fork:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    child.command("stoker.source.remote.helper_main", theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=child.environment(),
                )
            self._stop = weakref.finalize(self, _stop, self._control, self._process)
            _helpers.add(self)
        try:
            self._call("open", (place, pace), outage.shared)
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

    def leave_behind(self) -> None:
        """Let go of it in a forked child: it belongs to the parent."""
        self._stop.detach()
        self._control.close()
        # Only the parent can wait for it; without this the object would warn when it goes.
        self._process.returncode = 0


_helpers: weakref.WeakSet[Helper] = weakref.WeakSet()
# Held while a socket exists that a child must not keep and that is not registered yet.
_no_fork = threading.RLock()


def _in_child() -> None:
    for helper in list(_helpers):
        helper.leave_behind()
    _helpers.clear()
    _no_fork.release()


os.register_at_fork(
    before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_in_child
)


def _stop(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the process: it goes by itself when its socket closes, or is killed a second later."""
    control.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()

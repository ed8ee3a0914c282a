"""A web server that misbehaves as told: errors, cut bodies, stalls, and breaks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Self

REASONS = {
    "503": b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n",
    "500": b"HTTP/1.1 500 Oh No\r\ncontent-length: 0\r\n\r\n",
    "429": b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n",
    "404": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "403": b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n",
    "401": b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n",
}


class BadServer:
    """Serves ``/n`` as :meth:`body` of ``n``; what goes wrong is decided by :attr:`plan`.

    ``plan(key, turn, headers)`` is called for each GET with the path, how often it was asked for
    before, and the raw head of the request. It returns None for a good answer, a status like
    ``"503"``, ``"cut"`` for a body that ends early, ``"reset"`` for none, ``"other"`` for another
    version, or a number of seconds to wait before a good answer.
    """

    def __init__(self) -> None:
        self.plan: Callable[[str, int, str], str | float | None] = lambda key, turn, head: None
        self.asked: Counter[str] = Counter()
        self.length = 1000
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._socket.getsockname()[1])
        self._listening = threading.Event()
        self._listening.set()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def body(self, key: str) -> bytes:
        """Return what a good answer for ``key`` contains."""
        return (key.encode() * self.length)[: self.length]

    def stop(self) -> None:
        """Refuse connections, and drop those there are, as a server that is down."""
        self._listening.clear()
        # Closing alone does not wake a thread that waits in accept() or recv().
        for each in (self._socket, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def start(self) -> None:
        """Come back."""
        self._socket = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self._listening.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        server = self._socket
        while self._listening.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        try:
            with connection:
                pending = b""
                # A connection that was accepted as the server stopped is not served either.
                while self._listening.is_set() and (received := connection.recv(65536)):
                    pending += received
                    while b"\r\n\r\n" in pending:
                        head, _, pending = pending.partition(b"\r\n\r\n")
                        if not self._answer(connection, head.decode()):
                            return
        except OSError:
            pass
        finally:
            self._open.discard(connection)

    def _answer(self, connection: socket.socket, head: str) -> bool:
        """Answer one request; return whether the connection goes on."""
        method, path, _ = head.split(" ", 2)
        key = path.partition("?")[0].strip("/")  # a signed address carries a query
        what = None
        if method == "GET":
            what = self.plan(key, self.asked[key], head)
            self.asked[key] += 1
        if isinstance(what, float):
            time.sleep(what)
        elif what in REASONS:
            connection.sendall(REASONS[what])
            return True
        elif what == "reset":
            return False
        body = self.body(key)
        version = b"other" if what == "other" else b"v1"
        connection.sendall(
            b'HTTP/1.1 200 OK\r\ncontent-length: %d\r\netag: "%s"\r\n'
            b"last-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n" % (len(body), version)
        )
        if method == "HEAD":
            return True
        connection.sendall(body[: len(body) // 2] if what == "cut" else body)
        return what != "cut"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

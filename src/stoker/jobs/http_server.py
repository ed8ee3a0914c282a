"""An HTTP server for few clients at a time, with deadlines, for metrics and the live page."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from stoker.errors import ConfigError
from stoker.node import descriptors

log = logging.getLogger("stoker")

_MOST_BYTES = 16 << 10  # of a request's head
_TO_ASK = 5.0  # seconds for a client's whole request
_TO_TAKE = 5.0  # seconds for each write
_TO_GO = 0.2  # seconds for a client that is sent away


class BoundedServer(ThreadingMixIn, TCPServer):
    """Serves at most ``most`` clients of ``listener`` at a time, a request each.

    When there are more, the one that has taken longest to send its request gives way. So clients
    that say nothing do not keep others out, and threads, descriptors and memory do not run out.
    Closes ``listener`` when it is closed.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, listener: socket.socket, handler: type[BaseHTTPRequestHandler], most: int
    ) -> None:
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.stopping = threading.Event()
        """Set when the server closes."""
        self._most = most
        self._clients: dict[Any, bool] = {}  # whether they are still to ask, the oldest first
        self._changed = threading.Condition()
        self._runs = False

    def run(self) -> None:
        """Serve until :meth:`close`."""
        if self.stopping.is_set():
            return
        self._runs = True
        self.serve_forever(0.1)

    def close(self) -> None:
        """Stop listening."""
        self.stopping.set()
        if self._runs:
            self.shutdown()
        descriptors.drop(self.socket)

    def has_asked(self, request: Any) -> None:
        """Note that a client has sent its request: it is not sent away any more."""
        with self._changed:
            if request in self._clients:
                self._clients[request] = False

    def let_go(self, request: Any) -> None:
        """No longer count a client; may be called again."""
        with self._changed:
            self._clients.pop(request, None)
            self._changed.notify_all()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread of its own, if there is room for it."""
        if not self._admit(request):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is available
            self.let_go(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.let_go(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note in the log, for few, what ended a client: most often it has gone."""
        log.debug("a client over HTTP could not be served", exc_info=True)

    def _admit(self, request: Any) -> bool:
        with self._changed:
            if len(self._clients) >= self._most:
                silent = next((each for each, asks in self._clients.items() if asks), None)
                if silent is None:
                    return False
                with contextlib.suppress(OSError):  # it goes by itself
                    silent.shutdown(socket.SHUT_RDWR)
                self._changed.wait_for(lambda: len(self._clients) < self._most, _TO_GO)
            if len(self._clients) >= self._most:
                return False
            self._clients[request] = True
            return True


class Handler(BaseHTTPRequestHandler):
    """Reads one request with a deadline and a limit, and logs none."""

    server: BoundedServer
    server_version, sys_version = "stoker", ""

    def setup(self) -> None:
        """Read the request's head; OSError for one that is too long or takes too long."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self._head())
        self.server.has_asked(self.request)
        self.connection.settimeout(_TO_TAKE)

    def send(self, body: bytes, kind: str, **headers: str) -> None:
        """Send a whole answer of type ``kind``."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Answer the request."""
        self.answer()

    def answer(self) -> None:
        """Answer a GET for ``self.path``; for subclasses."""
        raise NotImplementedError

    def log_message(self, *arguments: object) -> None:
        """Do not log requests."""

    def _head(self) -> bytes:
        head, deadline = b"", time.monotonic() + _TO_ASK
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            left = deadline - time.monotonic()
            if left <= 0 or len(head) > _MOST_BYTES:
                raise ConnectionError("the request is too slow or too long")
            self.connection.settimeout(left)
            part = self.connection.recv(_MOST_BYTES)
            if not part:
                break
            head += part
        return head


def listen_at(port: int, host: str = "127.0.0.1", *, name: str) -> socket.socket:
    """Return a socket that listens at ``host``; ConfigError, with ``name``, if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with descriptors.no_fork:
            listener = socket.create_server((host, port), family=family, backlog=256)
            return descriptors.keep(listener)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host} with {name}={port} ({error}): give an address of this "
            "machine, and a free port"
        ) from error

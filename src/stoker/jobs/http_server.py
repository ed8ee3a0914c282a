"""What the service serves over HTTP: the text that Prometheus reads, and the live page.

Both to few clients at a time, with deadlines. The page is static, and what it shows comes as
server-sent events.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import io
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from stoker.errors import ConfigError, StokerError
from stoker.node import descriptors
from stoker.node.messages import is_ours, listen, open_to, peer

log = logging.getLogger("stoker")

EVERY = 2.0
"""Seconds between two events of the page."""

_MOST_SCRAPES = 8  # at the same time; every user of the machine may ask
_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of what Prometheus reads
_MOST = 16  # requests of pages at the same time
_MOST_VIEWERS = 32  # pages open at the same time
_MOST_OF_ANOTHER = 4  # of those, by one user who is not ours
_LIFE = 600.0  # seconds of a stream of events; a page then asks again by itself
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


class MetricsServer(BoundedServer):
    """Answers ``GET /metrics`` at the address ``host`` with what ``text`` returns, few at a time.

    ``port`` 0 is any free port. Raises :class:`~stoker.errors.ConfigError` if it is taken, or
    ``host`` is no address of this machine.
    """

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        class Metrics(Handler):
            def answer(self) -> None:
                try:
                    found = text() if self.path == "/metrics" else None
                except (StokerError, OSError):
                    self.send_error(503)
                    return
                if found is None:
                    self.send_error(404, "the metrics are at /metrics")
                else:
                    self.send(found.encode(), _TYPE)

        listener = listen_at(port, host, name="metrics_port")
        super().__init__(listener, Metrics, _MOST_SCRAPES)
        self.port: int = listener.getsockname()[1]
        """Where it listens."""


class WebServer(BoundedServer):
    """Serves the live page at ``GET /``, and at ``GET /events`` what ``frame`` returns as JSON.

    ``where`` is a port of 127.0.0.1, 0 for any, or the path of a Unix socket. Any user of the
    machine reaches a port, so that each request must hold the token that :attr:`url` ends with. A
    socket lets in this user, and with ``group``, a group's number, its members. ``frame`` is called
    every :data:`EVERY` seconds as long as anybody looks, by one thread at a time. Raises
    :class:`~stoker.errors.ConfigError` if it cannot listen there.
    """

    def __init__(
        self, where: int | Path, frame: Callable[[], str], *, group: int | None = None
    ) -> None:
        self._frame = frame
        self._looking = threading.Lock()
        self._shown: tuple[float, bytes] = -EVERY, b""
        self._viewers: Counter[int] = Counter()  # by user
        self._counting = threading.Lock()
        self._path = where if isinstance(where, Path) else None
        self._group = group
        self._inode = 0
        self._token = b""
        if isinstance(where, Path):
            try:
                listener = listen(where)
            except OSError as error:
                raise ConfigError(f"cannot listen at {where}: {error}") from error
            try:
                self._inode = open_to(where, group)
            except BaseException:
                descriptors.drop(listener)
                raise
            self.url = str(where)
            """Where the page is; holds the token, if it needs one."""
        else:
            listener = listen_at(where, name="web")
            token = secrets.token_urlsafe(32)
            self._token = token.encode()
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={quote(token)}"
        super().__init__(listener, _Page, _MOST)

    def close(self) -> None:
        """Stop listening, and end all streams; may be called again."""
        super().close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                if self._path.lstat().st_ino == self._inode:  # not what has taken its place
                    self._path.unlink()

    def admits(self, request: Any, query: str) -> bool:
        """Whether a request with this query may see anything; ValueError for what is no query."""
        if self._path is not None:  # the file's mode says who of the group may connect
            return self._group is not None or is_ours(request)
        told = parse_qs(query, max_num_fields=8).get("token", [""])[0]
        return hmac.compare_digest(told.encode(errors="replace"), self._token)

    @contextmanager
    def viewing(self, request: Any) -> Iterator[bool]:
        """Give whether there is room for one more stream; it is counted in place of its request."""
        user = os.geteuid() if self._path is None else peer(request).user
        with self._counting:
            most = _MOST_VIEWERS if user == os.geteuid() else _MOST_OF_ANOTHER
            is_in = self._viewers.total() < _MOST_VIEWERS and self._viewers[user] < most
            if is_in:
                self._viewers[user] += 1
        if not is_in:
            yield False
            return
        self.let_go(request)
        try:
            yield True
        finally:
            with self._counting:
                self._viewers[user] -= 1
                self._viewers += Counter()  # forget those of whom there is none

    def event(self) -> bytes:
        """Return the latest event, looked up now and then: looking asks every job."""
        with self._looking:
            since, event = self._shown
            if time.monotonic() - since >= EVERY / 2:
                try:
                    event = f"data: {self._frame()}\n\n".encode()
                except (StokerError, OSError):
                    event = b"event: trouble\ndata:\n\n"
                self._shown = time.monotonic(), event
            return event


class _Page(Handler):
    server: WebServer

    def answer(self) -> None:
        """Answer a request for the page or its events."""
        try:
            asked = urlsplit(self.path)
            may_see = self.server.admits(self.request, asked.query)
        except ValueError:
            self.send_error(400)
            return
        if not may_see:
            self.send_error(403, "the URL that stoker serve printed has the token")
        elif asked.path == "/":
            page, policy = _static()
            self.send(page, "text/html; charset=utf-8", Content_Security_Policy=policy)
        elif asked.path == "/events":
            self._stream()
        else:
            self.send_error(404)

    def end_headers(self) -> None:
        """Send the headers, with those that each answer has."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def _stream(self) -> None:
        with self.server.viewing(self.request) as is_in:
            if not is_in:
                self.send_error(503, "too many pages are open")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            end = time.monotonic() + _LIFE
            while time.monotonic() < end:
                self.wfile.write(self.server.event())  # OSError for a client that is slow or gone
                if self.server.stopping.wait(EVERY):
                    return


@cache
def _static() -> tuple[bytes, str]:
    """Return the page, and the policy by which a browser runs nothing but what is in it."""
    page = files("stoker.jobs").joinpath("web_page.html").read_text(encoding="utf-8")

    def only(tag: str) -> str:
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"

    return page.encode(), (
        f"default-src 'none'; script-src {only('script')}; style-src {only('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )

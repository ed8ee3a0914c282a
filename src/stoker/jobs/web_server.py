"""The HTTP server of the live page: one static page, and what it shows as server-sent events."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from stoker.errors import ConfigError, StokerError
from stoker.jobs.http_server import BoundedServer, Handler, listen_at
from stoker.jobs.service import open_to
from stoker.node import descriptors
from stoker.node.messages import is_ours, listen, peer

EVERY = 2.0
"""Seconds between two events."""

_MOST = 16  # requests at the same time
_MOST_VIEWERS = 32  # pages open at the same time
_MOST_OF_ANOTHER = 4  # of those, by one user who is not ours
_LIFE = 600.0  # seconds of a stream of events; a page then asks again by itself


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

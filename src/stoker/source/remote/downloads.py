"""Whole objects over HTTP, many at once in one thread: what libcurl does best.

The storage's own client needs a thread for each request under way, and they wait for each other's
interpreter. So first attempts are made here, and what does not succeed at once is left to that
client, which knows about retries, credentials and outages.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stoker.source.packed import Buffer
from stoker.source.remote.backend import UNKNOWN_TAG, Direct, Fault, tag_of

_BUFFER = 512 << 10  # bytes that libcurl reads at once: its most
_DISTRUST = 8  # failures in a row, without a success between them, after which it pauses
_PAUSE = 30.0  # seconds
_OK = 200
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem",
)  # fmt: skip


class Request(NamedTuple):
    """One object to get whole."""

    key: str
    size: int
    """Bytes when it was listed, 1 or more."""
    tag: int
    """Its version then; see :func:`stoker.source.remote.backend.tag_of`."""
    ticket: Any
    """Returned with the answer."""


Answer = tuple[Any, Buffer | None]
"""The ticket, and the object: None if it did not come as it was listed, for whatever reason."""
Tell = Callable[[int, int, int], None]
"""Called with requests made, those of them that failed, and bytes received."""


class Downloads:
    """Objects on their way. Belongs to one thread, but for :meth:`wake`.

    After eight failures in a row all requests fail at once for half a minute.
    """

    def __init__(self, direct: Direct, tell: Tell) -> None:
        """Open nothing yet. Raises ImportError without pycurl."""
        import pycurl

        self._pycurl: Any = pycurl
        self._multi: Any = pycurl.CurlMulti()
        self._direct, self._tell = direct, tell
        self._idle: list[_Transfer] = []
        self._refused: deque[Any] = deque()  # tickets
        self._failures, self._pause_until = 0, 0.0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not select, which takes no descriptor above 1,023: a training has more open.
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)
        self._due = float("inf")  # when libcurl wants to be called in any case
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._authorities = _authorities()
        self.under_way = 0
        """Requests that :meth:`wait` has not answered."""

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to get the objects."""
        self.under_way += len(requests)
        try:
            is_paused = self._pause_until > 0 and time.monotonic() < self._pause_until
            addresses = [] if is_paused else self._direct.addresses([each.key for each in requests])
        except Fault:  # the storage's client will say what is wrong
            addresses = []
        for request, address in zip(requests, addresses, strict=False):
            transfer = self._idle.pop() if self._idle else self._made()
            transfer.begin(request, address)
            self._multi.add_handle(transfer.handle)
        self._refused += [request.ticket for request in requests[len(addresses) :]]

    def wait(self, seconds: float) -> list[Answer]:
        """Return what has arrived or failed; wait for so long unless there is something.

        An empty list also after :meth:`wake`.
        """
        answers: list[Answer] = [(ticket, None) for ticket in self._refused]
        self._refused.clear()
        answers += self._arrived(0 if answers else seconds)
        self.under_way -= len(answers)
        return answers

    def wake(self) -> None:
        """End a wait that is under way, or the next; any thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Give up what is under way."""
        self._multi.close()
        self._poll.close()
        os.close(self._wake)

    def _watch(self, what: int, descriptor: int, _multi: Any, _data: Any) -> None:
        """Wait for what libcurl wants of a connection from now on."""
        reads, writes = self._pycurl.POLL_IN, self._pycurl.POLL_OUT
        events = select.EPOLLIN * bool(what & reads) | select.EPOLLOUT * bool(what & writes)
        if what == self._pycurl.POLL_REMOVE:
            with contextlib.suppress(OSError):  # closed: the kernel has removed it
                self._poll.unregister(descriptor)
            return
        try:
            self._poll.modify(descriptor, events)
        except FileNotFoundError:
            self._poll.register(descriptor, events)

    def _set_timer(self, milliseconds: int) -> None:
        self._due = time.monotonic() + milliseconds / 1e3 if milliseconds >= 0 else float("inf")

    def _advance(self, seconds: float) -> None:
        """Let libcurl read and write what it can; wait for so long until there is something."""
        left = min(seconds, self._due - time.monotonic()) if self.under_way else 0
        pycurl = self._pycurl
        for descriptor, events in self._poll.poll(max(0, left)):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
                continue
            ready = pycurl.CSELECT_IN * bool(events & (select.EPOLLIN | select.EPOLLHUP))
            ready |= pycurl.CSELECT_OUT * bool(events & select.EPOLLOUT)
            ready |= pycurl.CSELECT_ERR * bool(events & select.EPOLLERR)
            self._multi.socket_action(descriptor, ready)
        if time.monotonic() >= self._due:
            self._due = float("inf")
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)

    def _arrived(self, seconds: float) -> list[Answer]:
        self._advance(seconds)
        answers: list[Answer] = []
        left, requests, failed, received = 1, 0, 0, 0
        while left:
            left, good, bad = self._multi.info_read()
            for handle in (*good, *(handle for handle, _, _ in bad)):
                transfer: _Transfer = handle.transfer
                self._multi.remove_handle(handle)
                self._idle.append(transfer)
                ticket, data, num_bytes = transfer.end()
                requests, received = requests + 1, received + num_bytes
                failed += data is None
                self._judge(data is not None)
                answers.append((ticket, data))
        if requests:
            self._tell(requests, failed, received)
        return answers

    def _judge(self, is_good: bool) -> None:
        self._failures = 0 if is_good else self._failures + 1
        if self._failures >= _DISTRUST:
            self._failures, self._pause_until = 0, time.monotonic() + _PAUSE

    def _made(self) -> _Transfer:
        pycurl, direct = self._pycurl, self._direct
        handle: Any = pycurl.Curl()
        for option, value in (
            (pycurl.BUFFERSIZE, _BUFFER),
            (pycurl.NOSIGNAL, 1),
            (pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
            (pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1),  # as many connections as requests
            (pycurl.HTTPHEADER, [f"{name}: {text}" for name, text in direct.headers.items()]),
            (pycurl.CONNECTTIMEOUT_MS, int(1e3 * direct.connect_seconds)),
            (pycurl.TIMEOUT_MS, int(1e3 * direct.total_seconds)),
            (pycurl.LOW_SPEED_LIMIT, 1),
            (pycurl.LOW_SPEED_TIME, max(1, round(direct.stalled_seconds))),
            *((pycurl.CAINFO, file) for file in self._authorities),
        ):
            handle.setopt(option, value)
        return _Transfer(pycurl, handle)


class _Transfer:
    """One handle of libcurl's, which keeps its connection, and the object it is getting."""

    def __init__(self, pycurl: Any, handle: Any) -> None:
        self.handle = handle
        handle.transfer = self
        self._pycurl = pycurl
        self._parts: list[bytes] = []
        self._headers: list[bytes] = []
        self._request: Request | None = None

    def begin(self, request: Request, address: str) -> None:
        """Set up the next request."""
        self._request, self._parts, self._headers = request, [], []
        pycurl, handle = self._pycurl, self.handle
        handle.setopt(pycurl.URL, address)
        handle.setopt(pycurl.WRITEFUNCTION, self._parts.append)
        handle.setopt(pycurl.HEADERFUNCTION, self._headers.append)
        handle.setopt(pycurl.MAXFILESIZE_LARGE, request.size)

    def end(self) -> tuple[Any, Buffer | None, int]:
        """Return the ticket, the object if it is the one that was listed, and bytes received."""
        assert self._request is not None
        request, parts, self._request = self._request, self._parts, None
        self._parts = []
        received = sum(map(len, parts))
        data: Buffer | None = None
        if received == request.size and self.handle.getinfo(self._pycurl.RESPONSE_CODE) == _OK:
            tag = _tag(self._headers)
            if UNKNOWN_TAG in (tag, request.tag) or tag == request.tag:
                data = parts[0] if len(parts) == 1 else b"".join(parts)
        return request.ticket, data, received


def _tag(headers: list[bytes]) -> int:
    """Return the version that the answer states, as obstore's backend does."""
    version = _field(headers, b"etag:") or _field(headers, b"x-amz-version-id:")
    if not version and (changed := _field(headers, b"last-modified:")):
        from email.utils import parsedate_to_datetime  # an ETag is what most storages give

        with contextlib.suppress(ValueError):
            version = parsedate_to_datetime(changed).isoformat()
    return tag_of(version) if version else UNKNOWN_TAG


def _field(headers: list[bytes], name: bytes) -> str:
    """Return the value of a header, empty if there is none; ``name`` is in lower case."""
    length = len(name)
    for line in headers:
        if line[:length].lower() == name:
            return line[length:].strip().decode("latin-1")
    return ""


def _authorities() -> list[str]:
    """Return the file of certificates to trust: that of this machine, which libcurl is not told."""
    import ssl  # here, as it takes a helper that only lists a while

    known = ssl.get_default_verify_paths()
    for file in (os.environ.get("SSL_CERT_FILE"), known.cafile, *_CERTIFICATES):
        if file and Path(file).is_file():
            return [file]
    return []

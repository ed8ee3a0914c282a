"""Whole objects over HTTP, many at once in one thread: what libcurl does best.

The storage's own client needs a thread for each request under way, and they wait for each other's
interpreter. So first attempts are made here, and what does not succeed at once is left to that
client, which knows about retries, credentials and outages. The core drives the libcurl that pycurl
brings: the bytes go into their place without the interpreter.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from stoker._core import Downloads as Core
from stoker._core import Rooms
from stoker.errors import ConfigError
from stoker.source.packed import Buffer
from stoker.source.remote.backend import UNKNOWN_TAG, Direct, Entry, Fault, tag_of

_DISTRUST = 8  # failures in a row, without a success between them, after which it pauses
_PAUSE = 30.0  # seconds
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
    room: tuple[Rooms, int] | None = None
    """Where it is written to, if that is known already."""


Answer = tuple[Any, Buffer | None]
"""The ticket, and the object: None if it did not come as it was listed, for whatever reason.

No bytes: it is in its room."""
Tell = Callable[[int, int, int], None]
"""Called with requests made, those of them that failed, and bytes received."""


class Downloads:
    """Objects on their way. Belongs to one thread, but for :meth:`wake`.

    After eight failures in a row all requests fail at once for half a minute.
    """

    def __init__(self, direct: Direct, tell: Tell) -> None:
        """Open nothing yet. Raises ImportError without pycurl that shares its libcurl."""
        import pycurl

        module: Any = getattr(pycurl, "_pycurl", pycurl)  # pycurl is a package from 7.46 on
        try:
            self._core = Core(
                module.__file__,
                [f"{name}: {text}" for name, text in direct.headers.items()],
                _authorities() if direct.is_encrypted else "",
                int(1e3 * direct.connect_seconds),
                int(1e3 * direct.total_seconds),
                int(1e3 * direct.stalled_seconds),
            )
        except ConfigError as error:
            raise ImportError(str(error)) from error
        self._direct, self._tell = direct, tell
        self._refused: deque[Any] = deque()  # tickets
        self._failures, self._pause_until = 0, 0.0
        self.under_way = 0
        """Requests that :meth:`wait` has not answered."""

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to get the objects."""
        if not requests:
            return
        self.under_way += len(requests)
        keys, sizes, tags, tickets, rooms = zip(*requests, strict=True)
        try:
            is_paused = self._pause_until > 0 and time.monotonic() < self._pause_until
            addresses = [] if is_paused else self._direct.addresses(keys)
        except Fault:  # the storage's client will say what is wrong
            addresses = []
        if addresses:
            self._core.start(addresses, sizes, list(zip(tickets, tags, strict=True)), list(rooms))
        else:
            self._refused += tickets

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
        self._core.wake()

    def heads(self, keys: Sequence[str], ways: int) -> list[Entry | None]:
        """Return what the storage says of objects, asked ``ways`` at a time; None: not at once.

        For one that does nothing else meanwhile.
        """
        found: list[Entry | None] = [None] * len(keys)
        left, under_way, failures = iter(enumerate(self._direct.addresses(keys))), 0, 0
        while True:
            more = list(islice(left, ways - under_way)) if failures < _DISTRUST else []
            self._core.look([address for _, address in more], [index for index, _ in more])
            under_way += len(more)
            if not under_way:
                return found
            for index, data, _, version, is_date, length in self._core.wait(1.0):
                under_way -= 1
                if data is None or length < 0:
                    failures += 1
                else:
                    found[index] = Entry(keys[index].encode(), length, _tag(version, is_date))

    def close(self) -> None:
        """Give up what is under way."""
        self._core.close()

    def _arrived(self, seconds: float) -> list[Answer]:
        answers: list[Answer] = []
        received = failed = 0
        for (ticket, listed), data, num_bytes, version, is_date, _ in self._core.wait(seconds):
            if data is not None and not _is_version(listed, _tag(version, is_date)):
                data = None
            received += num_bytes
            failed += data is None
            self._judge(data is not None)
            answers.append((ticket, data))
        if answers:
            self._tell(len(answers), failed, received)
        return answers

    def _judge(self, is_good: bool) -> None:
        self._failures = 0 if is_good else self._failures + 1
        if self._failures >= _DISTRUST:
            self._failures, self._pause_until = 0, time.monotonic() + _PAUSE


def _is_version(listed: int, stated: int) -> bool:
    """Whether an answer is of the version that was listed, as far as both are known."""
    return UNKNOWN_TAG in (listed, stated) or listed == stated


def _tag(version: bytes, is_date: bool) -> int:
    """Return the tag of a version as an answer states it."""
    stated = version.decode("latin-1")
    if is_date and stated:  # an ETag is what most storages give
        from email.utils import parsedate_to_datetime

        try:
            stated = parsedate_to_datetime(stated).isoformat()
        except ValueError:
            return UNKNOWN_TAG
    return tag_of(stated) if stated else UNKNOWN_TAG


def _authorities() -> str:
    """Return the file of certificates to trust: that of this machine, which libcurl is not told.

    Empty where none is known.
    """
    import ssl  # here, as it takes a helper that only lists a while

    known = ssl.get_default_verify_paths()
    for file in (os.environ.get("SSL_CERT_FILE"), known.cafile, *_CERTIFICATES):
        if file and Path(file).is_file():
            return file
    return ""

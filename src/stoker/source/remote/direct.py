"""Whole objects of web servers for the process that wants them, which starts nothing for that.

A storage's own client runs threads, and would not survive a fork, so it lives in a helper process;
libcurl has none. First attempts are made here therefore, and the helper, which knows about retries
and outages, is started for what does not succeed at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import numpy as np

from stoker.source.packed import Bytes
from stoker.source.remote.backend import Direct, Entry
from stoker.source.remote.downloads import Downloads, Request
from stoker.source.remote.request import Tally, Wanted

_inherited: list[Downloads] = []  # to close them would end connections that the parent uses


class DirectReads:
    """First attempts at objects by libcurl, ``ways`` at a time in each call.

    ``succeeded`` is called when something was had. Thread-safe; a forked child calls :meth:`leave`,
    and makes another. Raises ImportError without pycurl that shares its libcurl.
    """

    def __init__(self, direct: Direct, ways: int, succeeded: Callable[[], None]) -> None:
        self._direct, self._ways, self._succeeded = direct, ways, succeeded
        self._tally = Tally()
        self._mutex = threading.Lock()
        self._idle = [self._made()]

    def fetch(self, wanted: Wanted, into: Bytes) -> list[int]:
        """Put pieces into ``into`` (u8[sum of lengths]); return the indices of those that lack.

        Pieces that are no whole objects always do.
        """
        ends = np.cumsum(wanted.lengths).tolist()
        lacking = set(np.flatnonzero(wanted.lengths).tolist())
        left = iter(np.flatnonzero((wanted.starts < 0) & (wanted.lengths > 0)).tolist())
        sizes, tags = wanted.sizes.tolist(), wanted.tags.tolist()
        with self._borrowed() as downloads:
            while True:
                more = islice(left, self._ways - downloads.under_way)
                downloads.start([Request(wanted.keys[i], sizes[i], tags[i], i) for i in more])
                if not downloads.under_way:
                    return sorted(lacking)
                for index, data in downloads.wait(1.0):
                    if data is not None:
                        into[ends[index] - len(data) : ends[index]] = np.frombuffer(data, np.uint8)
                        lacking.remove(index)

    def head(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return what the storage says of each object; None where the helper has to find out."""
        with self._borrowed() as downloads:
            found = downloads.heads(keys, self._ways)
        if any(found):
            self._succeeded()
        return found

    @property
    def tally(self) -> Tally:
        """What was asked for so far."""
        with self._mutex:
            return replace(self._tally)

    def close(self) -> None:
        """Close the connections that no call uses."""
        with self._mutex:
            while self._idle:
                self._idle.pop().close()

    def leave(self) -> None:
        """Leave the connections to the parent, in a child that inherited them."""
        _inherited.extend(self._idle)

    @contextmanager
    def _borrowed(self) -> Iterator[Downloads]:
        """Lend one to a call, which gives it back with nothing under way."""
        with self._mutex:
            downloads = self._idle.pop() if self._idle else None
        downloads = downloads or self._made()
        try:
            yield downloads
        except BaseException:
            downloads.close()
            raise
        with self._mutex:
            self._idle.append(downloads)

    def _made(self) -> Downloads:
        return Downloads(self._direct, self._tried)

    def _tried(self, requests: int, failed: int, received: int) -> None:
        if requests > failed:
            self._succeeded()
        with self._mutex:
            self._tally.requests += requests
            self._tally.failed += failed
            self._tally.received_bytes += received

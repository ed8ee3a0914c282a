"""A handle on a location in storage that any process can use, whatever it was started by."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from stoker.errors import ConfigError, SourceUnavailable
from stoker.source.listing import Keys
from stoker.source.pace import Pace
from stoker.source.packed import Bytes
from stoker.source.remote.backend import Entry, Fault, LocalLocation, Location
from stoker.source.remote.direct import DirectReads
from stoker.source.remote.downloads import Downloads
from stoker.source.remote.engine import Engine
from stoker.source.remote.helper import Helper, HelperDied
from stoker.source.remote.request import Failure, Outage, Tally, Wanted

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_STARTS = 3  # helpers that may die under one call before it is given up

_clients_here = False


def serve_clients_here() -> None:
    """Let clients run in this process instead of a helper's.

    For a process of Stoker's own that was started by exec, runs no code of the user's, never
    forks, and ends by ``os._exit``: the prefetcher. It saves a process and a copy.
    """
    global _clients_here
    _clients_here = True


class _Link(Protocol):
    """What a client works through: an engine here, or one in a helper."""

    def call(self, method: str, *arguments: Any) -> Any: ...

    def fetch(self, wanted: Wanted, num_bytes: int) -> tuple[Bytes, dict[int, Failure]]: ...

    def close(self) -> None: ...


class _Here:
    """An engine in this process."""

    def __init__(self, location: Location, pace: Pace, outage: Outage) -> None:
        self._engine = Engine(location, pace, outage)

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "tally":
            return self._engine.tally
        return getattr(self._engine, method)(*arguments)

    def fetch(self, wanted: Wanted, num_bytes: int) -> tuple[Bytes, dict[int, Failure]]:
        data = np.empty(num_bytes, np.uint8)
        return data, self._engine.fetch(wanted, data.data)

    def close(self) -> None:
        self._engine.close()


class Client:
    """One location in storage, opened when it is first used in a process, and once in each.

    Pickles, and may be inherited through a fork at any time: what is opened stays with the
    process that opened it; an outage is one for all of them. Whole objects of web servers are
    first tried for in this process, which starts nothing for that. Thread-safe. All methods raise
    :class:`ConfigError` when the location cannot be opened, and :class:`SourceUnavailable` when the
    helper process keeps dying.
    """

    def __init__(self, location: Location, pace: Pace, in_process: bool = False) -> None:
        """Name the location; nothing is opened yet. ``in_process`` is for what is safe to fork."""
        self._location, self._pace = location, pace
        self._in_process = in_process or isinstance(location, LocalLocation)
        self._outage = Outage()
        self._start()

    def _start(self) -> None:
        self._link: _Link | None = None
        self._direct: DirectReads | None = None
        self._has_looked = False
        self._opening = threading.Lock()
        _clients.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_A_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def fetch(self, wanted: Wanted) -> tuple[Bytes, dict[int, Failure]]:
        """Return ``(data u8[sum of lengths], failures by index)``; see :meth:`Engine.fetch`."""
        num_bytes = int(wanted.lengths.sum())
        direct = None if (wanted.starts >= 0).all() else self._reads_directly()
        if direct is None:
            return self._through(lambda link: link.fetch(wanted, num_bytes))
        data = np.empty(num_bytes, np.uint8)
        left = direct.fetch(wanted, data)
        if not left:
            return data, {}
        rest = wanted.take(left)
        got, failures = self._through(lambda link: link.fetch(rest, int(rest.lengths.sum())))
        ends, had = np.cumsum(wanted.lengths)[left], np.cumsum(rest.lengths)
        for end, length, stop in zip(ends, rest.lengths, had, strict=True):
            data[end - length : end] = got[stop - length : stop]
        return data, {left[index]: failure for index, failure in failures.items()}

    @property
    def concurrency(self) -> int:
        """Requests that may be under way in this process."""
        return self._pace.concurrency

    @property
    def is_here(self) -> bool:
        """Whether requests are made in this process, so that :meth:`get` costs no more than one."""
        return self._in_process or _clients_here

    @property
    def starts_nothing(self) -> bool:
        """Whether whole objects can be had with nothing to be started for that, as a rule."""
        return self.is_here or self._reads_directly() is not None

    def get(self, key: str, size: int, tag: int) -> memoryview | Failure:
        """Return the object ``key``, or why it could not be had; see :meth:`Engine.get`."""
        return cast(
            memoryview | Failure, self._through(lambda link: link.call("get", key, size, tag))
        )

    def downloads(self) -> Downloads | None:
        """Return what gets many objects in one thread of this process; None where nothing does."""
        if not self.is_here:
            return None
        return cast(Downloads | None, self._through(lambda link: link.call("downloads")))

    def head(self, keys: list[str]) -> list[Entry | Failure]:
        """Return what the storage says of each object."""
        direct = self._reads_directly()
        found = [None] * len(keys) if direct is None else direct.head(keys)
        left = [key for key, entry in zip(keys, found, strict=True) if entry is None]
        rest = iter(self._through(lambda link: link.call("head", left)) if left else ())
        return [next(rest) if entry is None else entry for entry in found]

    def list_all(self, prefix: str) -> Keys | Failure:
        """Return all objects that begin with ``prefix``, sorted by key."""
        return cast(Keys | Failure, self._through(lambda link: link.call("list_all", prefix)))

    def list_folders(self, prefix: str) -> Keys | Failure:
        """Return all objects in the folders directly below ``prefix``."""
        return cast(Keys | Failure, self._through(lambda link: link.call("list_folders", prefix)))

    def page(self, prefix: str, after: str) -> list[Entry] | Failure:
        """Return the first page of objects that begin with ``prefix`` and sort after ``after``."""
        return cast(
            list[Entry] | Failure, self._through(lambda link: link.call("page", prefix, after))
        )

    @property
    def is_open(self) -> bool:
        """Whether a request can be made at once, with nothing to be started for it."""
        return self.is_here or self._link is not None

    @property
    def tally(self) -> Tally:
        """What this process has asked of the storage since it opened it."""
        with self._opening:
            link, direct = self._link, self._direct
        tally = Tally() if direct is None else direct.tally
        try:
            return tally if link is None else tally + cast(Tally, link.call("tally"))
        except HelperDied:
            return tally

    def close(self) -> None:
        """Close what this process has opened; another use would open it again."""
        with self._opening:
            link, self._link = self._link, None
            direct, self._direct = self._direct, None
            self._has_looked = False
        if link is not None:
            link.close()
        if direct is not None:
            direct.close()

    def _reads_directly(self) -> DirectReads | None:
        """Return what gets whole objects here; None where all requests are the link's."""
        with self._opening:
            if not self._has_looked:
                self._has_looked = True
                self._direct = self._make_direct()
            return self._direct

    def _make_direct(self) -> DirectReads | None:
        if self.is_here or not self._pace.is_plain:  # an engine makes its own first attempts
            return None
        direct = self._location.direct()
        try:
            ways = self._pace.concurrency
            return None if direct is None else DirectReads(direct, ways, self._outage.end)
        except ImportError:
            return None

    def _through(self, use: Callable[[_Link], _T]) -> _T:
        """Return ``use(link)``; a helper that dies in it is replaced."""
        for _ in range(_STARTS):
            link: _Link | None = None
            try:
                link = self._open()
                return use(link)
            except Fault as fault:
                raise ConfigError(f"{fault}: check the address and storage_options") from fault
            except HelperDied as error:
                _log.warning("%s; starting it again", error)
                last = error
                if link is not None:
                    self._forget(link)
        raise SourceUnavailable(f"{last}, {_STARTS} times: see the log for why") from last

    def _open(self) -> _Link:
        with self._opening:
            if self._link is None:
                kind = _Here if self.is_here else Helper
                self._link = kind(self._location, self._pace, self._outage)
            return self._link

    def _forget(self, link: _Link) -> None:
        with self._opening:
            if self._link is link:
                self._link = None
        link.close()


_OF_A_PROCESS = ("_link", "_direct", "_has_looked", "_opening")
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _in_child() -> None:
    for client in list(_clients):
        client._link = None
        client._opening = threading.Lock()
        client._has_looked = False
        if client._direct is not None:
            client._direct.leave()
            client._direct = None


os.register_at_fork(after_in_child=_in_child)

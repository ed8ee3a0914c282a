"""Reads and lists one location in storage: concurrency, retries, second requests for late ones."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from typing import TypeVar

import numpy as np

from stoker.errors import redacted
from stoker.source.listing import Keys, KeyTable, concatenate, pack_entries
from stoker.source.pace import Pace, RateLimit
from stoker.source.remote.backend import UNKNOWN_TAG, Backend, Entry, Fault, Got, Location, Why
from stoker.source.remote.downloads import Downloads
from stoker.source.remote.request import Failure, Outage, Tally, Wanted

_WINDOW = 1024
_ENOUGH = 64
_REFRESH = 32
Page = list[Entry]
Ask = Callable[[Callable[[], Page | None]], Page | None]
"""Calls a function until it succeeds or is given up."""
_T = TypeVar("_T")
_log = logging.getLogger("stoker")
_NO_USE = (Why.NOT_FOUND, Why.INVALID, Why.REFUSED)
_NO_ANSWER = (Why.UNREACHABLE, Why.NO_CREDENTIALS, Why.INVALID)
_NOTICEABLE = 2.0  # seconds after which a request that keeps failing is worth a line
_TELL_EVERY = 60.0  # seconds between two lines at least: some outages come in pieces


class Latencies:
    """The last thousand latencies and a percentile of them. Thread-safe."""

    def __init__(self, quantile: float) -> None:
        """Watch the ``quantile`` (between 0 and 1) of the latencies."""
        self._quantile = quantile
        self._recent = np.zeros(_WINDOW)
        self._count = 0
        self._late: float | None = None
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Note how long a request took."""
        with self._lock:
            self._recent[self._count % _WINDOW] = seconds
            self._count += 1
            if self._count >= _ENOUGH and self._count % _REFRESH == 0:
                known = self._recent[: min(self._count, _WINDOW)]
                self._late = float(np.quantile(known, self._quantile))

    @property
    def late(self) -> float | None:
        """After how many seconds a request is late; None while too few are known."""
        return self._late


def list_prefix(backend: Backend, prefix: str, ask: Ask) -> Keys:
    """Return all objects whose keys begin with ``prefix``, sorted by key.

    A page that fails is asked for again through ``ask``, from the last key on where the storage
    lists in order, from the beginning where it does not. One thread.
    """
    table = KeyTable()
    pages: Iterator[Page] | None = None

    def next_page() -> Page | None:
        nonlocal table, pages
        if pages is None:
            if not table.is_sorted:
                table = KeyTable()
            pages = iter(backend.pages(prefix, table.last.decode()))
        try:
            return next(pages, None)
        except BaseException:
            pages = None
            raise

    while (page := ask(next_page)) is not None:
        table.add(page)
    return table.finish()


class Engine:
    """Uses one backend with many threads. Thread-safe; belongs to the process that made it."""

    def __init__(
        self,
        location: Location,
        pace: Pace,
        outage: Outage,
        tell: Callable[[str], None] = _log.warning,
    ) -> None:
        """Open ``location``; ``tell`` is called with a line for each outage of ``outage``.

        Raises Fault when the location refuses its options.
        """
        self._name = redacted(location.root)
        self._backend: Backend = location.open(pace.concurrency)
        self._pace = pace
        limits = (pace.requests_per_second, pace.bytes_per_second)
        self._limit = RateLimit(self._name, *limits) if any(limits) else None
        self._lanes = ThreadPoolExecutor(pace.concurrency, "stoker-fetch")
        self._slots = threading.Semaphore(pace.concurrency)
        self._spares = ThreadPoolExecutor(2 * pace.concurrency, "stoker-hedge")
        self._latencies = Latencies(pace.hedge) if pace.hedge is not None else None
        self._draw = random.Random()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._generation = 0
        self._outage, self._tell = outage, tell
        self._told = -math.inf
        self._has_worked = False
        self.tally = Tally()

    def fetch(self, wanted: Wanted, into: memoryview) -> dict[int, Failure]:
        """Put the pieces into ``into`` (u8[sum of lengths]); return why those that lack do."""
        ends = np.cumsum(wanted.lengths).tolist()
        lengths = wanted.lengths.tolist()
        sizes = wanted.sizes.tolist()
        tags = wanted.tags.tolist()
        starts = wanted.starts.tolist()
        failures: dict[int, Failure] = {}
        begun = time.monotonic()

        def piece(index: int) -> None:
            end, length = ends[index], lengths[index]
            if length == 0:
                return
            key, start = wanted.keys[index], starts[index]
            ask = -1 if start < 0 else length

            def attempt() -> Got:
                got = self._hedged(key, max(start, 0), ask, length)
                _check(got, length, sizes[index], tags[index])
                return got

            try:
                into[end - length : end] = self._until_had(attempt, begun).data
            except _GivenUp as error:
                failures[index] = error.failure

        self._spread(piece, len(lengths))
        return failures

    def get(self, key: str, size: int, tag: int) -> memoryview | Failure:
        """Return the object ``key``, listed with ``size`` and ``tag``, in the memory it came in.

        Or why it could not be had. The caller sees to it that not too many threads are in here.
        """

        def attempt() -> memoryview:
            got = self._hedged(key, 0, -1, size)
            _check(got, size, size, tag)
            return got.data

        return self._answer(attempt, time.monotonic())

    def downloads(self) -> Downloads | None:
        """Return what gets many objects in one thread; None where that is not possible.

        It makes first attempts only, which neither wait for a rate limit nor are asked twice.
        """
        if not self._pace.is_plain:
            return None
        direct = self._backend.direct()
        try:
            return None if direct is None else Downloads(direct, self._tried)
        except ImportError:
            return None

    def _tried(self, requests: int, failed: int, received: int) -> None:
        """Count first attempts."""
        if requests > failed:
            self._outage.end()
            self._has_worked = True
        with self._lock:
            self.tally.requests += requests
            self.tally.failed += failed
            self.tally.received_bytes += received

    def head(self, keys: list[str]) -> list[Entry | Failure]:
        """Return what the storage says of each object."""
        answers: list[Entry | Failure | None] = [None] * len(keys)
        begun = time.monotonic()

        def one(index: int) -> None:
            answers[index] = self._answer(lambda: self._backend.head(keys[index]), begun)

        self._spread(one, len(keys))
        return [answer for answer in answers if answer is not None]

    def list_all(self, prefix: str) -> Keys | Failure:
        """Return all objects that begin with ``prefix``, sorted by key."""
        begun = time.monotonic()
        try:
            return list_prefix(self._backend, prefix, lambda page: self._until_had(page, begun))
        except _GivenUp as error:
            return error.failure

    def list_folders(self, prefix: str) -> Keys | Failure:
        """Return all objects in the folders directly below ``prefix``, which are listed at once.

        Folder by folder, sorted by key in each; what lies beside them is left out.
        """
        begun = time.monotonic()
        try:
            below: tuple[list[str], list[Entry]] = self._until_had(
                lambda: self._backend.folders(prefix), begun
            )
            folders = sorted(below[0])
            parts: list[Keys] = [pack_entries([])] * len(folders)

            def one(index: int) -> None:
                parts[index] = list_prefix(
                    self._backend, folders[index], lambda page: self._until_had(page, begun)
                )

            self._spread(one, len(folders))
            return concatenate(parts)
        except _GivenUp as error:
            return error.failure

    def page(self, prefix: str, after: str) -> list[Entry] | Failure:
        """Return the first page of objects that begin with ``prefix`` and sort after ``after``."""
        ask = lambda: next(iter(self._backend.pages(prefix, after)), [])  # noqa: E731
        return self._answer(ask, time.monotonic())

    def close(self) -> None:
        """Stop: what is waiting to be asked again gives up."""
        self._closing.set()
        self._lanes.shutdown(wait=False, cancel_futures=True)
        self._spares.shutdown(wait=False, cancel_futures=True)

    def _spread(self, work: Callable[[int], None], length: int) -> None:
        """Do ``work(i)`` for every ``i`` below ``length``, on as many lanes as there are.

        The caller's thread is one of them: to hand over costs more than a small read.
        """
        turn = count()

        def lane() -> None:
            while (index := next(turn)) < length:
                with self._slots:
                    work(index)

        others = min(length, self._pace.concurrency) - 1
        lanes = [self._lanes.submit(lane) for _ in range(others)]
        try:
            lane()
        finally:
            for each in lanes:
                if not each.cancel():  # those that did not begin have nothing left to do
                    each.result()

    def _answer(self, ask: Callable[[], _T], begun: float) -> _T | Failure:
        """Return the answer, or why there is none."""
        try:
            return self._until_had(ask, begun)
        except _GivenUp as error:
            return error.failure

    def _until_had(self, attempt: Callable[[], _T], begun: float) -> _T:
        """Return what ``attempt`` returns, once it does; raises _GivenUp.

        ``begun`` is when the call began that it is for, by ``time.monotonic()``.
        """
        begin = time.monotonic()
        renewed = False
        for failures in count(1):
            generation = self._generation
            try:
                answer = attempt()
            except Fault as fault:
                self._count(failed=1, throttled=int(fault.why is Why.THROTTLED))
                if fault.why is Why.REFUSED and not renewed:
                    renewed = True
                    self._renew(generation)
                    continue
                left = self._time_left(fault, failures, begin, begun)
                if left <= 0:
                    raise _GivenUp(fault, failures, time.monotonic() - begin) from fault
                self._pause(fault, failures, left)
            except _Changed as error:
                raise _GivenUp(error, failures, time.monotonic() - begin) from error
            else:
                self._outage.end()
                self._has_worked = True
                return answer
        raise AssertionError("count() does not end")

    def _time_left(self, fault: Fault, failures: int, begin: float, begun: float) -> float:
        """Return for how many seconds to try again what failed; none are left: 0 or less."""
        if fault.why not in _NO_ANSWER:
            self._outage.answer()
        if fault.why in _NO_USE or self._closing.is_set():
            return 0.0
        if fault.why is Why.NO_CREDENTIALS and not self._has_worked:
            return 0.0
        retry, unreachable = self._pace.retry, fault.why is Why.UNREACHABLE
        since = self._outage.fail(retry)
        now = time.monotonic()
        if retry.is_over(failures, now - begin):
            return 0.0
        left = self._outage.limit(retry, since, begun, unreachable) - now
        if left > 0 and (unreachable or now - begin >= _NOTICEABLE):
            self._tell_once(fault, since, left)
        return left

    def _tell_once(self, fault: Fault, since: float, left: float) -> None:
        """Say that storage does not answer, once for each outage."""
        with self._lock:
            if self._told >= since or time.monotonic() - self._told < _TELL_EVERY:
                return
            self._told = time.monotonic()
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        self._tell(
            f"{self._name} cannot be read: {fault}; trying again until {until}, for {left:.0f} s "
            "(pace=Pace(retry=Retry(...)) of the source changes that)"
        )

    def _pause(self, fault: Fault, failures: int, left: float) -> None:
        with self._lock:
            seconds = self._pace.retry.wait(failures, fault.why is Why.THROTTLED, self._draw)
        self._closing.wait(min(seconds, left))

    def _renew(self, generation: int) -> None:
        """Request new credentials, once for all requests rejected with the old ones."""
        with self._lock:
            if generation == self._generation:
                self._generation += 1
                self._backend.renew()

    def _get(self, key: str, start: int, ask: int, length: int) -> Got:
        if self._limit is not None:
            self._limit.wait(length, self._closing)
        begin, received = time.monotonic(), 0
        try:
            got = self._backend.get(key, start, ask)
            received = len(got.data)
        finally:
            with self._lock:
                self.tally.requests += 1
                self.tally.received_bytes += received
        if self._latencies is not None:
            self._latencies.add(time.monotonic() - begin)
        return got

    def _hedged(self, key: str, start: int, ask: int, length: int) -> Got:
        """Return the answer to a request, or to a second one like it if the first is late."""
        late = self._latencies.late if self._latencies is not None else None
        if late is None:
            return self._get(key, start, ask, length)

        def request() -> Got:
            return self._get(key, start, ask, length)

        first: Future[Got] = self._spares.submit(request)
        if wait((first,), late).done:
            return first.result()
        self._count(hedged=1)
        both = {first, self._spares.submit(request)}
        while both:
            done, both = wait(both, return_when=FIRST_COMPLETED)
            winner = min(done, key=lambda future: future.exception() is not None)
            if winner.exception() is None or not both:
                break
        return winner.result()

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self.tally, name, getattr(self.tally, name) + value)


class _Changed(Exception):
    """The object is not the one that was listed."""


class _GivenUp(Exception):
    """The attempts at one request are over."""

    def __init__(self, error: Exception, attempts: int, seconds: float) -> None:
        super().__init__(str(error))
        why = error.why if isinstance(error, Fault) else None
        self.failure = Failure(why, str(error), attempts, seconds)


def _check(got: Got, length: int, size: int, tag: int) -> None:
    """Raise unless the bytes are those that were listed."""
    if got.size >= 0 and got.size != size:
        raise _Changed(f"it has {got.size} bytes now, and had {size} when it was listed")
    if tag != UNKNOWN_TAG and got.tag not in (tag, UNKNOWN_TAG):
        raise _Changed("it was replaced by another version since it was listed")
    if len(got.data) != length:
        raise Fault(Why.CUT, f"the body ended after {len(got.data)} of {length} bytes")

"""Copies files: the threads that do, and how one is copied whole.

To a temporary name, checked against the source, then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import io
import itertools
import logging
import mmap
import os
import stat
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from stoker.node.owned import trusts
from stoker.types import FileIdentity

log = logging.getLogger("stoker.tiering")
StrPath = str | os.PathLike[str]
T = TypeVar("T")
_CHUNK = 1 << 20
_own = threading.local()
_LOWEST = 19  # niceness
_CROWD = 100  # waiting files that are too many for one processor


class SourceChanged(OSError):
    """The source file is not, or no longer, the one to be copied."""


class TierFault(OSError):
    """The tier, not the source, failed; ``errno`` says how."""


class Origin(NamedTuple):
    """What a copy was made from; the copy alone does not show that its source was rebuilt."""

    source: FileIdentity
    copy_inode: int
    crc: int | None
    """CRC-32 of the bytes, where one was wanted."""


def copy_file(
    source: StrPath,
    part: StrPath,
    final: StrPath,
    expected: FileIdentity,
    *,
    handed: io.FileIO | None = None,
    fsync: bool = False,
    checksum: bool = False,
    begin: Callable[[int], object] = lambda inode: None,
    progress: Callable[[int], object] = lambda done: None,
) -> Origin:
    """Copy ``source`` to ``final`` by way of ``part``; ``final`` appears whole or not at all.

    The source is read once, from beginning to end: by ``handed``, a program's own descriptor of it,
    if that is given, which is closed then: the storage need not open it again, and what the program
    reads too comes from the page cache once. ``begin`` gets the inode of ``part`` and of the
    copy before any byte is in it, ``progress`` every MiB how many bytes are. The copy carries the
    source's modification time, and it is read-only. Returns what :func:`is_copy` goes by.
    Raises :class:`SourceChanged` if the source is not ``expected`` or changes,
    :class:`TierFault` if writing fails, and :class:`OSError` as reading does; ``part`` is then
    removed. Threads may copy at the same time, each to names of its own.
    """
    with handed or _open(source) as file:
        reader = file.fileno()
        _check(reader, expected)
        if handed is None:
            _expect_all(reader, expected.size)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with _faults_of_tier():
            writer = os.open(part, flags, 0o600)
        try:
            inode = os.fstat(writer).st_ino
            begin(inode)
            crc = _transfer(reader, writer, expected.size, progress, checksum)
            _check(reader, expected)
            with _faults_of_tier():
                os.utime(writer, ns=(expected.mtime_ns, expected.mtime_ns))
                os.fchmod(writer, 0o400)
                if fsync:
                    os.fsync(writer)
                os.replace(part, final)
                if fsync:
                    _sync_folder(os.path.dirname(final))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        finally:
            os.close(writer)
    return Origin(expected, inode, crc if checksum else None)


def _open(source: StrPath) -> io.FileIO:
    return io.FileIO(os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK))


def _expect_all(reader: int, size: int) -> None:
    """Read ahead far, or, of large files, whole requests past the page cache.

    That is a few large operations instead of many, and leaves memory to what the programs read.
    """
    os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    if size > _CHUNK:
        _set_direct(reader, True)


@contextlib.contextmanager
def _faults_of_tier() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierFault(error.errno, error.strerror, error.filename) from error


def is_copy(
    path: StrPath, expected: FileIdentity, origin: Origin | None, *, checksum: bool = False
) -> bool:
    """Whether ``path`` is the finished copy described by ``origin``, made from ``expected``.

    With ``checksum`` its bytes are read. Without ``origin`` it is not accepted as a copy.
    """
    if origin is None or origin.source != expected:
        return False
    try:
        copy = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        status = os.fstat(copy)
        found = FileIdentity.of(status)
        if not trusts(status) or (found.inode, found.size, found.mtime_ns) != (
            origin.copy_inode,
            expected.size,
            expected.mtime_ns,
        ):
            return False
        return not checksum or origin.crc == _crc(copy)
    except OSError:
        return False
    finally:
        os.close(copy)


def _check(reader: int, expected: FileIdentity) -> None:
    status = os.fstat(reader)
    if not stat.S_ISREG(status.st_mode) or FileIdentity.of(status) != expected:
        raise SourceChanged(errno.ESTALE, "the source file changed while it was copied")


def _transfer(
    reader: int, writer: int, size: int, progress: Callable[[int], object], want_crc: bool
) -> int:
    """Copy ``size`` bytes; return their CRC-32, or 0 if it is not wanted."""
    done = crc = 0
    buffer = _buffer()
    while done < size:
        count = _read(reader, buffer, done)
        if count == 0:
            raise SourceChanged(errno.ESTALE, "the source file shrank while it was copied")
        if count > size - done:
            raise SourceChanged(errno.ESTALE, "the source file grew while it was copied")
        _write_all(writer, buffer[:count])
        if want_crc:
            crc = zlib.crc32(buffer[:count], crc)
        done += count
        if done < size:
            progress(done)
    return crc


def _buffer() -> memoryview:
    """Return a MiB of the thread's own, aligned as reads past the page cache must be."""
    if not hasattr(_own, "buffer"):
        _own.buffer = memoryview(mmap.mmap(-1, _CHUNK))
    buffer: memoryview = _own.buffer
    return buffer


def _read(reader: int, buffer: memoryview, begin: int) -> int:
    """Read at a place, for a descriptor's own offset may be a program's."""
    try:
        return os.preadv(reader, [buffer], begin)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _set_direct(reader, False)  # the file system takes it only in theory
    return os.preadv(reader, [buffer], begin)


def _set_direct(reader: int, wanted: bool) -> None:
    flags = fcntl.fcntl(reader, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        flags = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        fcntl.fcntl(reader, fcntl.F_SETFL, flags)


def _write_all(writer: int, data: memoryview) -> None:
    with _faults_of_tier():
        while data:
            data = data[os.write(writer, data) :]


def _crc(reader: int) -> int:
    crc, buffer = 0, memoryview(bytearray(_CHUNK))
    while count := os.readv(reader, [buffer]):
        crc = zlib.crc32(buffer[:count], crc)
    return crc


def _sync_folder(folder: StrPath) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class WorkQueue(Generic[T]):
    """Calls ``work(item)`` in ``threads`` threads.

    Items with the same ``key`` are not worked on at the same time: one that is waiting stands for
    those put later, one that comes while another is at work follows it. Smaller ``urgency`` goes
    first, then order of arrival decides. An exception from ``work`` is logged. With ``beside`` the
    threads leave the processors to programs: they have the lowest priority and keep to one of them
    while little waits, as far as the system lets them.
    """

    def __init__(
        self,
        threads: int,
        work: Callable[[T], object],
        *,
        key: Callable[[T], Hashable],
        beside: bool = False,
    ) -> None:
        self._work, self._key, self._beside = work, key, beside
        self._heap: list[tuple[int, int, T]] = []
        self._arrivals = itertools.count()
        self._waiting: set[Hashable] = set()
        self._running: set[Hashable] = set()
        self._again: dict[Hashable, tuple[int, T]] = {}
        self._closed = False
        self._condition = threading.Condition()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, item: T, urgency: int = 0) -> None:
        """Have an item worked on."""
        with self._condition:
            key = self._key(item)
            if key in self._running:
                self._again[key] = urgency, item
            elif key not in self._waiting:
                self._push(key, item, urgency)

    def __len__(self) -> int:
        """Return how many items wait."""
        return len(self._waiting)

    def is_idle(self) -> bool:
        """Whether nothing waits or is worked on."""
        with self._condition:
            return not (self._waiting or self._running)

    def close(self) -> None:
        """Forget what waits, and return when the threads have ended."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _push(self, key: Hashable, item: T, urgency: int) -> None:
        self._waiting.add(key)
        heapq.heappush(self._heap, (urgency, next(self._arrivals), item))
        self._condition.notify()

    def _run(self) -> None:
        processors = _Processors() if self._beside else None
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._heap or self._closed)
                if self._closed:
                    return
                item = heapq.heappop(self._heap)[2]
                key = self._key(item)
                self._waiting.discard(key)
                self._running.add(key)
            if processors is not None:
                processors.use_one(len(self._waiting) < _CROWD)
            try:
                self._work(item)
            except Exception:  # of this item: the others still need the thread
                log.exception("an item of work failed: %r", item)
            with self._condition:
                self._running.discard(key)
                if key in self._again:
                    urgency, item = self._again.pop(key)
                    self._push(key, item, urgency)


class _Processors:
    """Those of the calling thread, which gets the lowest priority; some systems refuse either."""

    def __init__(self) -> None:
        self._all = os.sched_getaffinity(0)
        self._one = False
        with contextlib.suppress(OSError):  # each thread has its own on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)

    def use_one(self, wanted: bool) -> None:
        """Keep to one, so that a program that wakes up finds another free, or use all again.

        The kernel may let a program wait for milliseconds, of whatever priority what runs is.
        """
        if wanted != self._one:
            self._one = wanted
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {max(self._all)} if wanted else self._all)

"""Caches that the users of a group share: the service's side of :mod:`stoker.pool.group_pool`.

The operator names folders of images. The service lists each, keeps an arena for it, and is the only
process that reads files into it and writes it; members get the memory to read it only.

Who may have it: a member shows, with descriptors that it opened, that it may read one file of each
class of rights there is. A class is what decides about reading: device, owner, group, mode and
access lists of the folder, of every folder on the way, and of the file. Only files of these classes
are ever kept; they are opened by way of folders that were opened before, never over a link, so that
what is kept is what the rights are of. Rights that change later count for what is read later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import resource
import socket
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker._core import segment_bytes
from stoker.errors import (
    CapacityError,
    ConfigError,
    SampleCorrupt,
    SampleNotFound,
    SegmentError,
    SourceError,
    StokerError,
)
from stoker.node.bandwidth import FetchShare
from stoker.node.messages import parse, read_line
from stoker.policy.base import Region
from stoker.pool.group_pool import MAX_ANSWER, MOST_IDS, MOST_PROOFS, VERSION, WAIT
from stoker.source.base import Errors, PackedRead, PackedSource
from stoker.source.image_folder import ImageFolderSource
from stoker.source.packed import pack
from stoker.store.arena import Arena
from stoker.store.memory_tier import MemoryTier
from stoker.store.store import Store
from stoker.store.tier import Ids
from stoker.types import Outcome, format_bytes, parse_bytes

log = logging.getLogger("stoker")

_MOST = 2048  # connections, if the limit of open files is twice that
_OF_ONE = 0.25  # of those, that one user may have
_JOINING = 4  # of those of one user, that may show descriptors at the same time
_READS = 32  # files that are read at once for one user
_LOOK_AGAIN = 60.0  # seconds between two listings of a folder
_LOOKED_AT = 512  # files whose rights are looked at to find the classes there are
_TURN = 0.2 * WAIT  # seconds that a user's reads wait for their share of the bandwidth
_NOBODY = -1  # for whom a sample was read that is not there
_FLIGHT = 0.8 * WAIT  # seconds that a user's thread waits for what another's reads
_SILENT = 86400.0  # seconds that a member may ask for nothing
_NO_LIST = {errno.ENODATA, errno.EOPNOTSUPP}
# What file systems decide by, beside owner, group and mode.
_LISTS = ("system.posix_acl_access", "system.nfs4_acl", "system.cifs_acl", "security.selinux")

Allow = Callable[[int], contextlib.AbstractContextManager[tuple[float, FetchShare]]]
"""See :class:`GroupCaches`."""
Rights = tuple[tuple[Any, ...], ...]
"""What decides about reading a file, of each folder on the way and of the file."""


@dataclass(frozen=True)
class SharedFolder:
    """A folder of class folders with images, and the memory that its cache may have."""

    path: Path
    size: str = "100%"
    """Payload: bytes, or a share of those of the folder."""

    @staticmethod
    def parse(text: str) -> SharedFolder:
        """Return what ``DIR`` or ``DIR=SIZE`` says; ConfigError for a size that is none."""
        path, equals, size = text.rpartition("=")
        folder = SharedFolder(Path(path), size) if equals else SharedFolder(Path(text))
        parse_bytes(folder.size, of=1, name=f"share {text!r}")
        return folder


class Folder:
    """A folder held open, below which files are opened without following links."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Not before the last read: its number could be another folder's by then.
        weakref.finalize(self, os.close, self._fd)

    def open(self, name: str) -> tuple[int, Rights]:
        """Return a descriptor of the file ``name``, to read, and what decides about reading it.

        Raises OSError, also for a link on the way, and where rights cannot be found out.
        """
        *folders, file = name.split("/")
        at, rights = os.dup(self._fd), []
        try:
            rights.append(_rights(at))
            for folder in folders:
                below = os.open(
                    folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
                )
                os.close(at)
                at = below
                rights.append(_rights(at))
            fd = os.open(
                file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at
            )
        finally:
            os.close(at)
        try:
            return fd, (*rights, _rights(fd))
        except BaseException:
            os.close(fd)
            raise


def _rights(fd: int) -> tuple[Any, ...]:
    status = os.fstat(fd)
    lists = []
    for name in _LISTS:
        try:
            lists.append(os.getxattr(fd, name))
        except OSError as error:
            if error.errno not in _NO_LIST:
                raise
            lists.append(b"")
    return status.st_dev, status.st_uid, status.st_gid, status.st_mode, *lists


def proves(proof: int, fd: int, rights: Rights) -> bool:
    """Whether ``proof`` shows that who opened it may read what has these ``rights``, as ``fd`` has.

    That is: it is open for reading, and of the very file.
    """
    flags = fcntl.fcntl(proof, fcntl.F_GETFL)
    # A descriptor of a mere path can be had without permission to read.
    if flags & os.O_PATH or flags & os.O_ACCMODE not in (os.O_RDONLY, os.O_RDWR):
        return False
    status = os.fstat(proof)
    if not (stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.fstat(fd))):
        return False
    # By another name it can be reached by who may not enter these folders.
    return status.st_nlink == 1 or all(map(_lets_everybody_in, rights[:-1]))


def _lets_everybody_in(rights: tuple[Any, ...]) -> bool:
    _, _, _, mode, *lists = rights
    return mode & 0o111 == 0o111 and not any(lists[:3])


def _allow_all(user: int) -> contextlib.AbstractContextManager[tuple[float, FetchShare]]:
    return contextlib.nullcontext((math.inf, FetchShare(0)))


class _Readable(PackedSource):
    """The files of a listing that are of known classes, read by threads of its own."""

    def __init__(self, cache: GroupCache) -> None:
        self._cache = cache
        self._threads = ThreadPoolExecutor(_READS, "stoker-group-read")

    def __len__(self) -> int:
        return len(self._cache.files)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each file."""
        return self._cache.files.sizes

    @property
    def fingerprint(self) -> str:
        """That of the listing."""
        return self._cache.files.fingerprint

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the files that may be kept; the others have errors."""
        wanted = np.asarray(ids, np.uint32).tolist()
        read = list(self._threads.map(self._read, wanted))
        errors: Errors = {
            row: found for row, found in enumerate(read) if isinstance(found, SourceError)
        }
        return *pack([b"" if isinstance(found, SourceError) else found for found in read]), errors

    def _read(self, sample: int) -> bytes | SourceError:
        try:
            return self._cache.read(sample)
        except SourceError as error:
            return error
        except OSError as error:
            return SampleNotFound(f"{self._cache.files.name(sample)}: {error}", [sample])

    def close(self) -> None:
        """Read no more; reads under way are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class GroupCache:
    """The cache of one folder, open; ``size`` as that of :class:`SharedFolder`.

    Only this process writes it. Samples that have come in stay: which those are is up to who asks
    first, and no member can take them from others. Safe in any thread. Raises
    :class:`~stoker.errors.ConfigError` and the errors of
    :class:`~stoker.source.image_folder.ImageFolderSource` and :class:`~stoker.store.arena.Arena`.
    """

    def __init__(
        self,
        path: Path,
        size: str,
        admit: Callable[[int], bool] = lambda _: True,
        allow: Allow = _allow_all,
    ) -> None:
        self.files = ImageFolderSource(path.resolve())
        self.identity = self.files.fingerprint, self.files.local_identity
        self._root = os.path.join(path.resolve(), "")  # noqa: PTH118
        self._sizes = self.files.sizes
        whole = int(self._sizes.sum())
        self.capacity = min(whole, parse_bytes(size, of=whole, name=f"share {str(path)!r}"))
        self._folder = Folder(path.resolve())
        self._classes = self._find_classes()
        mean = max(1, round(whole / len(self._sizes)))
        needed = segment_bytes(len(self._sizes), self.capacity, mean, False)
        if not admit(needed):
            raise CapacityError(
                f"the service has no room for {format_bytes(needed)}: give it more with --memory, "
                f"or {path} less"
            )
        self._arena = Arena(len(self._sizes), self.capacity, mean)
        region = Region("main", 1.0, order="insertion", admission="while_room")
        self._arena.configure([region])
        # Now: a member may lock any byte of the memory to read, and then no slot could be taken.
        self._arena.abandon(np.flatnonzero(self._arena.claim([0])))
        self._mutex = threading.Lock()
        self._room = self.capacity
        self._payers = np.full(len(self._sizes), _NOBODY)
        self._allow = allow
        self._read_for: Counter[int] = Counter()  # bytes by user
        self._stores: dict[int, tuple[_Readable, Store]] = {}  # by user

    @property
    def memory(self) -> int:
        """Bytes of memory that it takes."""
        return self._arena.capacity_bytes + self._arena.overhead_bytes

    def examples(self) -> list[int]:
        """Return a file of each class, which a member must be able to read, as far as there is."""
        found = []
        for rights, samples in self._classes.items():
            found += [sample for sample in samples if self._rights(sample) == rights][:1]
        return found

    def accepts(self, samples: Sequence[int], proofs: Sequence[int]) -> bool:
        """Whether ``proofs`` are of these :meth:`examples`, each open to read, of all classes."""
        shown = set()
        for sample, proof in zip(samples, proofs, strict=False):
            try:
                fd, rights = self._open(sample)
            except OSError:
                return False
            try:
                if not proves(proof, fd, rights):
                    return False
            finally:
                os.close(fd)
            shown.add(rights)
        return shown >= self._classes.keys()

    def open_to_read(self) -> int:
        """Return a descriptor of the memory by which nothing can be written."""
        # Opened again: it is not ours that members get, and the mode lets no other user do this.
        fd = self._arena.handle.fds[0]
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def bring(self, user: int, ids: Ids) -> tuple[Ids, bool]:
        """Bring what is missing of ``ids``, as far as there is room, for a user.

        Returns what was read from the folder for that, and whether the cache is full.
        """
        missing = np.unique(ids[~self._arena.contains(ids)])
        with self._allow(user) as (allowed, share):
            chosen = self._reserve(missing, user, allowed)
        read = np.empty(0, np.uint32)
        try:
            if len(chosen) and _await_turn(share, int(self._sizes[chosen].sum())):
                served = self._store(user).serve(chosen)
                fetched = served.outcomes == Outcome.FETCHED
                fetched[list(served.errors)] = False
                read = served.ids[fetched]
                read = read[self._arena.contains(read)]
        finally:
            self._settle(chosen, user)
        return read, len(chosen) < len(missing)

    def read(self, sample: int) -> bytes:
        """Return a file that may be kept; SourceError or OSError if there is none such."""
        fd, rights = self._open(sample)
        try:
            if rights not in self._classes:
                raise SampleNotFound(f"{self.files.name(sample)} is not read for all", [sample])
            size, data = int(self._sizes[sample]), bytearray()
            while part := os.pread(fd, size + 1 - len(data), len(data)):
                data += part
        finally:
            os.close(fd)
        if len(data) != size:
            raise SampleCorrupt(f"{self.files.name(sample)} has changed", [sample])
        return bytes(data)

    def read_for(self) -> Counter[int]:
        """Return the bytes that are there, or about to be, by the user for whom they were read."""
        with self._mutex:
            return Counter(self._read_for)

    def told(self) -> dict[str, Any]:
        """Return what there is to tell of it."""
        with self._mutex:
            stores = dict(self._stores)
        return {
            "capacity_bytes": self.capacity,
            "payload_bytes": self._arena.stats()["payload_bytes"],
            "users": {str(user): _books(store) for user, (_, store) in stores.items()},
        }

    def close(self) -> None:
        """Let go of it; members keep what they have mapped."""
        with self._mutex:
            stores, self._stores = self._stores, {}
        for readable, _ in stores.values():
            readable.close()
        self._arena.close()

    def _open(self, sample: int) -> tuple[int, Rights]:
        return self._folder.open(self.files.name(sample).removeprefix(self._root))

    def _rights(self, sample: int) -> Rights | None:
        """Return what decides about reading a file now; None if it cannot be opened."""
        try:
            fd, rights = self._open(sample)
        except OSError:  # a link, or not for us
            return None
        os.close(fd)
        return rights

    def _find_classes(self) -> dict[Rights, list[int]]:
        """Return the commonest classes of rights, each with some files of it."""
        count = len(self._sizes)
        some = np.random.default_rng().choice(count, min(count, _LOOKED_AT), replace=False)
        found: dict[Rights, list[int]] = {}
        for sample in some.tolist():
            if (rights := self._rights(sample)) is not None:
                found.setdefault(rights, []).append(sample)
        if not found:
            raise ConfigError(f"{self._root}: no file can be read without following a link")
        commonest = sorted(found, key=lambda rights: -len(found[rights]))
        return {rights: found[rights] for rights in commonest[:MOST_PROOFS]}

    def _reserve(self, ids: Ids, user: int, allowed: float) -> Ids:
        """Return those of ``ids``, each once, that there is room for, and keep it for them."""
        with self._mutex:
            is_charged = self._payers[ids] != _NOBODY  # or on its way for another member
            ends = np.cumsum(np.where(is_charged, 0, self._sizes[ids]))
            chosen: Ids = ids[is_charged | (ends <= min(self._room, allowed))]
            self._charge(chosen, np.ones(len(chosen), np.bool_), user)
            return chosen

    def _settle(self, ids: Ids, user: int) -> None:
        """Keep room for those that are there, and no other."""
        with self._mutex:
            self._charge(ids, self._arena.contains(ids), user)

    def _charge(self, ids: Ids, are: npt.NDArray[np.bool_], user: int) -> None:
        for sample, is_there in zip(ids.tolist(), are.tolist(), strict=True):
            payer, size = int(self._payers[sample]), int(self._sizes[sample])
            if is_there == (payer != _NOBODY):
                continue
            self._payers[sample] = user if is_there else _NOBODY
            self._read_for[user if is_there else payer] += size if is_there else -size
            self._room -= size if is_there else -size

    def _store(self, user: int) -> Store:
        with self._mutex:
            if user not in self._stores:
                # One each, so that a user's reads wait for no other's.
                readable = _Readable(self)
                store = Store(readable, MemoryTier(self._arena), wait_seconds=_FLIGHT)
                self._stores[user] = readable, store
            return self._stores[user][1]


def _books(store: Store) -> dict[str, int]:
    totals = store.totals()
    return {"read": int(totals["read"]), "read_bytes": int(totals["bytes_from_source"])}


class GroupCaches:
    """The caches of all shared folders, and the connections of their members.

    ``admit`` is asked for bytes of memory before a cache takes them, and returns whether it may;
    ``allow`` for how many bytes may yet be read for a user, which no other thread is told until it
    is left, and for his share of the fetch bandwidth.
    Safe in any thread.
    """

    def __init__(
        self,
        folders: Sequence[SharedFolder],
        admit: Callable[[int], bool] = lambda _: True,
        allow: Allow = _allow_all,
    ) -> None:
        self._folders, self._admit, self._allow = tuple(folders), admit, allow
        self._caches: dict[SharedFolder, GroupCache] = {}
        self._listed: dict[SharedFolder, float] = {}  # when, last
        self._asked = threading.Event()  # a member asked for what is not known
        self._mutex = threading.Lock()
        self._is_closed = False
        self._most = min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._members: Counter[int] = Counter()  # connections by user
        self._joining: dict[int, threading.BoundedSemaphore] = {}  # by user
        self._connections: set[socket.socket] = set()

    @property
    def memory(self) -> int:
        """Bytes of memory that they take together."""
        with self._mutex:
            return sum(cache.memory for cache in self._caches.values())

    def read_for(self) -> Counter[int]:
        """Return the bytes that are kept by the user for whom they were read."""
        with self._mutex:
            caches = list(self._caches.values())
        return sum((cache.read_for() for cache in caches), Counter())

    def told(self) -> list[dict[str, Any]]:
        """Return what there is to tell of each; folders are not named in full."""
        with self._mutex:
            caches = list(self._caches.items())
        told = []
        for folder, cache in caches:
            with contextlib.suppress(SegmentError):  # it was closed meanwhile
                told.append({"folder": folder.path.name, **cache.told()})
        return told

    def look(self) -> None:
        """List folders that have no cache yet; and those that changed, where a member asked."""
        asked = self._asked.is_set()
        self._asked.clear()
        for folder in self._folders:
            is_due = time.monotonic() - self._listed.get(folder, -_LOOK_AGAIN) >= _LOOK_AGAIN
            if is_due and (asked or folder not in self._caches):
                self._listed[folder] = time.monotonic()
                try:
                    self._renew(folder)
                except (StokerError, OSError) as error:
                    log.warning("no cache of %s is shared: %s", folder.path, error)

    def attend(self, connection: socket.socket, user: int, message: dict[str, Any]) -> None:
        """Serve a member that asked to join with ``message``, until it leaves.

        ``user`` is who the kernel says. Raises OSError when the connection ends.
        """
        if not self._admit_member(user, connection):
            _send(connection, refused="too many processes of this user ask at the same time")
            return
        try:
            cache = self._cache_of(message)
            joining = self._joining[user]
            if not joining.acquire(timeout=WAIT):
                raise ConfigError("too many processes of this user join at the same time")
            try:
                self._let_in(connection, cache)
            finally:
                joining.release()
            while True:
                ids = _ids(connection, len(cache.files))
                read, is_full = cache.bring(user, ids)
                _send(connection, read=read.tolist(), full=is_full)
        except (StokerError, RuntimeError) as error:  # a cache that was closed
            _send(connection, refused=str(error))
        finally:
            self._dismiss_member(user, connection)

    def close(self) -> None:
        """End all connections and caches; members keep what they have mapped."""
        with self._mutex:
            connections, caches = list(self._connections), list(self._caches.values())
            self._caches, self._is_closed = {}, True
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for cache in caches:
            cache.close()

    def _renew(self, folder: SharedFolder) -> None:
        """Make the cache of a folder, in place of one of what it was before."""
        old = self._caches.get(folder)
        if old is not None:
            files = ImageFolderSource(folder.path.resolve())
            if (files.fingerprint, files.local_identity) == old.identity:
                return
            with self._mutex:
                del self._caches[folder]
            old.close()
        cache = GroupCache(folder.path, folder.size, self._admit, self._allow)
        with self._mutex:
            if not self._is_closed:
                self._caches[folder] = cache
        if self._is_closed:
            cache.close()
            return
        log.info(
            "%s: %d files, of which %s are shared",
            folder.path,
            len(cache.files),
            format_bytes(cache.capacity),
        )

    def _cache_of(self, message: dict[str, Any]) -> GroupCache:
        """Return the cache of what a member has; ConfigError if there is none."""
        identity = message.get("fingerprint"), message.get("local")
        with self._mutex:
            for cache in self._caches.values():
                if cache.identity == identity:
                    return cache
        self._asked.set()
        raise ConfigError("no folder that is shared here has these files, or not yet")

    def _let_in(self, connection: socket.socket, cache: GroupCache) -> None:
        """Send the memory to a member that proves that it may read the files."""
        samples = cache.examples()
        _send(connection, prove=samples)
        proofs = _receive_proofs(connection)
        try:
            is_proved = cache.accepts(samples, proofs)
        finally:
            for proof in proofs:
                os.close(proof)
        if not is_proved:
            raise ConfigError("not all files that were asked for were shown open to be read")
        memory = cache.open_to_read()
        try:
            socket.send_fds(connection, [_line()], [memory])
        finally:
            os.close(memory)

    def _admit_member(self, user: int, connection: socket.socket) -> bool:
        with self._mutex:
            most_of_one = max(1, int(_OF_ONE * self._most))
            if self._members.total() >= self._most or self._members[user] >= most_of_one:
                return False
            self._joining.setdefault(user, threading.BoundedSemaphore(_JOINING))
            self._members[user] += 1
            self._connections.add(connection)
            return True

    def _dismiss_member(self, user: int, connection: socket.socket) -> None:
        with self._mutex:
            self._connections.discard(connection)
            self._members[user] -= 1
            self._members += Counter()  # forget those of whom there is none


def _await_turn(share: FetchShare, num_bytes: int) -> bool:
    """Wait until so many bytes may be read, and pay; False if that would take too long."""
    deadline = time.monotonic() + _TURN
    while seconds := share.seconds_to_wait():
        if time.monotonic() + seconds > deadline:
            return False
        time.sleep(seconds)
    share.spend(num_bytes)
    return True


def _receive_proofs(connection: socket.socket) -> list[int]:
    """Return the descriptors that a member shows; they are the caller's to close.

    Closed with nothing held: the file system may be the member's own, and let that wait.
    """
    connection.settimeout(WAIT)
    line, fds, flags, _ = socket.recv_fds(connection, 1 << 12, MOST_PROOFS, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & socket.MSG_CTRUNC or not line.endswith(b"\n"):
            raise ConnectionError("no descriptors came with a line")
        parse(line, VERSION)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _ids(connection: socket.socket, num_samples: int) -> Ids:
    """Return what a member asks for next; OSError for what makes no sense."""
    message = parse(read_line(connection, MAX_ANSWER, time.monotonic() + _SILENT), VERSION)
    try:
        ids = np.array(message.get("bring"), np.int64).reshape(-1)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConnectionError(f"no ids: {error}") from error
    if len(ids) > MOST_IDS or ((ids < 0) | (ids >= num_samples)).any():
        raise ConnectionError("ids out of range")
    return ids.astype(np.uint32)


def _line(**message: Any) -> bytes:
    return json.dumps({"stoker": VERSION, **message}).encode() + b"\n"


def _send(connection: socket.socket, **message: Any) -> None:
    connection.settimeout(WAIT)
    connection.sendall(_line(**message))

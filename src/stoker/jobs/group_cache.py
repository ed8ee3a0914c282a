"""Caches that the users of a group share: the service's side of :mod:`stoker.pool.group_pool`.

The operator names folders of images. The service lists each, keeps an arena for it, and is the only
process that reads files into it and writes it; members get the memory to read it only.

Who may have it: a member shows, with descriptors that it opened, that it may read one file of each
class of rights there is (:mod:`stoker.jobs.group_files`); no other files are kept. What is kept is
what some member's job will need soonest, as far as they tell (:mod:`stoker.jobs.group_plans`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker._core import segment_bytes
from stoker.errors import CapacityError, ConfigError, SegmentError, StokerError
from stoker.jobs.group_files import GroupFiles, ReadableFiles, SharedFolder
from stoker.jobs.group_plans import SELDOM, Job, Last, Plans
from stoker.node.bandwidth import FetchShare
from stoker.node.messages import parse
from stoker.policy.base import Region
from stoker.pool.group_pool import (
    MAX_ANSWER,
    MOST_ACCESSES,
    MOST_IDS,
    MOST_PROOFS,
    VERSION,
    WAIT,
    line_of,
)
from stoker.source.image_folder import ImageFolderSource
from stoker.store.arena import Arena
from stoker.store.memory_tier import MemoryTier
from stoker.store.store import Store
from stoker.store.tier import Ids
from stoker.types import Outcome, format_bytes, parse_bytes

log = logging.getLogger("stoker")

_MOST = 2048  # connections, if the limit of open files is twice that
_OF_ONE = 0.25  # of those, that one user may have
_JOINING = 4  # of those of one user, that may show descriptors at the same time
_LOOK_AGAIN = 60.0  # seconds between two listings of a folder
_TURN = 0.2 * WAIT  # seconds that a user's reads wait for their share of the bandwidth
_NO_USER = -1  # for whom a sample was read that is not there
_FLIGHT = 0.8 * WAIT  # seconds that a user's thread waits for what another's reads
_SILENT = 86400.0  # seconds that a member may ask for nothing
_SLOWEST = 10e6  # bytes a second of a plan
_AT_ONCE = 1 << 16  # samples whose keys are renewed in one go

Allow = Callable[[int], contextlib.AbstractContextManager[tuple[float, FetchShare]]]
"""See :class:`GroupCaches`."""


def _allow_all(user: int) -> contextlib.AbstractContextManager[tuple[float, FetchShare]]:
    return contextlib.nullcontext((math.inf, FetchShare(0)))


class GroupCache:
    """The cache of one folder, open; ``size`` as that of :class:`SharedFolder`.

    Only this process writes it. While there is room, all that members ask for comes in and stays.
    Then it is decided by the plans that they tell: what some job uses sooner takes the place of
    what is used last, and what no job is known to use displaces nothing. What would not come in
    is not read. Each sample that is kept counts for the user for whom it was read, until it leaves.
    Safe in any thread. Raises the errors of
    :class:`~stoker.jobs.group_files.GroupFiles` and :class:`~stoker.store.arena.Arena`.
    """

    def __init__(
        self,
        path: Path,
        size: str,
        admit: Callable[[int], bool] = lambda _: True,
        allow: Allow = _allow_all,
    ) -> None:
        self.files = GroupFiles(path)
        self._sizes = self.files.sizes
        whole = int(self._sizes.sum())
        self.capacity = min(whole, parse_bytes(size, of=whole, name=f"share {str(path)!r}"))
        mean = max(1, round(whole / len(self._sizes)))
        needed = segment_bytes(len(self._sizes), self.capacity, mean, False)
        if not admit(needed):
            raise CapacityError(
                f"the service has no room for {format_bytes(needed)}: give it more with --memory, "
                f"or {path} less"
            )
        self._arena = Arena(len(self._sizes), self.capacity, mean)
        self._arena.configure([Region("main", 1.0, order="key")])
        # Now: a member may lock any byte of the memory to read, and then no slot could be taken.
        self._arena.abandon(np.flatnonzero(self._arena.claim([0])))
        self.wants_plans = self.capacity < whole
        """Whether it matters who needs what when."""
        self._plans = Plans(len(self._sizes), self.capacity, admit)
        self._mutex = threading.Lock()
        self._coming_in: Counter[int] = Counter()  # requests that bring a sample now
        self._allow = allow
        self._payers = np.full(len(self._sizes), _NO_USER)  # of what is there or coming in, users
        self._read_for: Counter[int] = Counter()  # bytes by user
        self._checked = 0.0  # until when payers are of what is there, nearly
        self._due = 0.0  # when keys are renewed next
        self._last = Last(self._arena, self._sizes)
        self._stores: dict[int, tuple[ReadableFiles, Store]] = {}  # by user

    @property
    def memory(self) -> int:
        """Bytes of memory that it takes."""
        return self._arena.capacity_bytes + self._arena.overhead_bytes + self._plans.memory

    def open_to_read(self) -> int:
        """Return a descriptor of the memory by which nothing can be written."""
        # Opened again: it is not ours that members get, and the mode lets no other user do this.
        fd = self._arena.handle.fds[0]
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def bring(self, job: Job, ids: Ids) -> tuple[Ids, bool]:
        """Bring what is missing of ``ids`` for a job, as far as it is to be kept.

        Returns what was read from the folder for that, and whether the cache is full, for good.
        """
        missing = np.unique(ids[~self._arena.contains(ids)])
        keys = self._plans.keys(missing, job)
        with self._allow(job[0]) as (allowed, share):
            chosen = self._reserve(missing, keys, job[0], allowed)
        read = np.empty(0, np.uint32)
        try:
            if len(chosen) and _await_turn(share, int(self._sizes[chosen].sum())):
                # The job has not taken them yet: nothing is needed sooner.
                now = np.full(len(chosen), -time.monotonic())
                served = self._store(job[0]).serve(chosen, now)
                fetched = served.outcomes == Outcome.FETCHED
                fetched[list(served.errors)] = False
                read = served.ids[fetched]
                read = read[self._arena.contains(read)]
        finally:
            self._settle(chosen)
        return read, len(chosen) < len(missing) and not len(self._plans)

    # --- plans ---

    def makes_room_for_plan(self, job: Job, accesses: int) -> bool:
        """Whether ``job`` may tell a plan of so many accesses."""
        return self.wants_plans and self._plans.reserve(job, accesses)

    def tell(self, job: Job, ids: Ids, length: int, is_last: bool) -> None:
        """Learn what ``job`` needs; see :class:`~stoker.jobs.group_plans.Coming`."""
        self._plans.tell(job, ids, length, is_last)
        self.renew_keys()

    def has_plan(self, job: Job) -> bool:
        """Whether ``job`` has told what it needs."""
        return job in self._plans

    def take(self, job: Job, ids: Ids) -> None:
        """Note that ``job`` has taken samples ``ids``: it needs their next copy later."""
        if self._plans.take(job, ids):
            self._arena.set_keys(ids, self._plans.keys(ids))

    def pass_by(self, job: Job, position: int) -> None:
        """Note that ``job`` has had so many of the accesses of its plan."""
        ids = self._plans.pass_by(job, position)
        if len(ids):
            self._arena.set_keys(ids, self._plans.keys(ids))

    def leave(self, job: Job) -> None:
        """Forget what ``job`` needs."""
        self._plans.leave(job)
        with contextlib.suppress(SegmentError):  # it was closed meanwhile
            self.renew_keys()

    def renew_keys_if_due(self) -> None:
        """Renew keys if that costs little of the time, and plans are known."""
        begin = time.monotonic()
        if len(self._plans) and begin >= self._due:
            with contextlib.suppress(SegmentError):  # it was closed meanwhile
                self.renew_keys()
            self._due = begin + SELDOM * (time.monotonic() - begin)

    def renew_keys(self) -> None:
        """Give all that is kept the keys of now: jobs come and go, and are as fast as they are."""
        kept = self._arena.list("main")
        for begin in range(0, len(kept), _AT_ONCE):
            some = kept[begin : begin + _AT_ONCE]
            self._arena.set_keys(some, self._plans.keys(some))
        self._last.forget()

    # --- the rest ---

    def read_for(self) -> Counter[int]:
        """Return the bytes that are there, or about to be, by the user for whom they were read.

        What left since the latest look may count still; looks cost little of the time.
        """
        with self._mutex:
            begin = time.monotonic()
            if begin >= self._checked:
                with contextlib.suppress(SegmentError):  # it was closed meanwhile
                    self._refund(np.flatnonzero(self._payers != _NO_USER).astype(np.uint32))
                now = time.monotonic()
                self._checked = now + SELDOM * (now - begin)
            return Counter(self._read_for)

    def told(self) -> dict[str, Any]:
        """Return what there is to tell of it."""
        with self._mutex:
            stores = dict(self._stores)
        return {
            "capacity_bytes": self.capacity,
            "payload_bytes": self._arena.stats()["payload_bytes"],
            "plans": len(self._plans),
            "users": {str(user): _books(store) for user, (_, store) in stores.items()},
        }

    def close(self) -> None:
        """Let go of it; members keep what they have mapped."""
        with self._mutex:
            stores, self._stores = self._stores, {}
        for readable, _ in stores.values():
            readable.close()
        self._arena.close()

    def _reserve(self, ids: Ids, keys: npt.NDArray[np.float64], user: int, allowed: float) -> Ids:
        """Return those of ``ids``, each once, that are to come in; room is kept for them.

        ``keys`` f64[n] are those that they have once who asks has taken them. ``user`` is
        charged for those that no user is charged for yet, ``allowed`` bytes at most.
        """
        with self._mutex:
            self._refund(ids)
            coming = np.array(list(self._coming_in), np.uint32)
            # In this order: what comes in meanwhile counts once at most.
            room = self.capacity - self._arena.stats()["payload_bytes"]
            room -= int(self._sizes[coming[~self._arena.contains(coming)]].sum())
            is_paid = self._payers[ids] != _NO_USER  # for another member
            others, keys = ids[~is_paid], keys[~is_paid]
            soonest = np.argsort(-keys, kind="stable")
            able = soonest[np.cumsum(self._sizes[others[soonest]]) <= allowed]
            new = others[able][self._last.lose_to(others[able], keys[able], room)]
            self._payers[new] = user
            self._read_for[user] += int(self._sizes[new].sum())
            chosen = np.concatenate([ids[is_paid], new])
            self._coming_in.update(chosen.tolist())
            return chosen

    def _settle(self, ids: Ids) -> None:
        """Note that a request has ended that was to bring ``ids``."""
        with self._mutex:
            self._coming_in.subtract(ids.tolist())
            self._coming_in += Counter()  # forget those that no request brings
            self._refund(ids)

    def _refund(self, ids: Ids) -> None:
        """Charge no user for those of ``ids``, each once, that are neither there nor coming in."""
        gone = ids[(self._payers[ids] != _NO_USER) & ~self._arena.contains(ids)]
        gone = gone[~np.isin(gone, np.array(list(self._coming_in), np.uint32))]
        payers, sizes = self._payers[gone], self._sizes[gone]
        for payer in np.unique(payers).tolist():
            self._read_for[payer] -= int(sizes[payers == payer].sum())
        self._read_for += Counter()  # forget those for whom nothing is there
        self._payers[gone] = _NO_USER

    def _store(self, user: int) -> Store:
        with self._mutex:
            if user not in self._stores:
                # One each, so that a user's reads wait for no other's.
                readable = ReadableFiles(self.files)
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
        with self._mutex:
            caches = list(self._caches.values())
        for cache in caches:
            cache.renew_keys_if_due()

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
            Conversation(connection, user, cache).hold()
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
            if (files.fingerprint, files.local_identity) == old.files.identity:
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
                if cache.files.identity == identity:
                    return cache
        self._asked.set()
        raise ConfigError("no folder that is shared here has these files, or not yet")

    def _let_in(self, connection: socket.socket, cache: GroupCache) -> None:
        """Send the memory to a member that proves that it may read the files."""
        samples = cache.files.examples()
        _send(connection, prove=samples)
        proofs = _receive_proofs(connection)
        try:
            is_proved = cache.files.accepts(samples, proofs)
        finally:
            for proof in proofs:
                os.close(proof)
        if not is_proved:
            raise ConfigError("not all files that were asked for were shown open to be read")
        memory = cache.open_to_read()
        try:
            socket.send_fds(connection, [line_of(plans=cache.wants_plans)], [memory])
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


class Conversation:
    """What a member that was let in says, over ``connection``, and what it is answered.

    Lines of JSON; ids that follow one are ``u32[n]``. What makes no sense raises OSError, which
    ends the conversation; with it the plan that was told in it is forgotten.
    """

    def __init__(self, connection: socket.socket, user: int, cache: GroupCache) -> None:
        self._connection, self._user, self._cache = connection, user, cache
        self._num_samples = len(cache.files)
        self._told: Job | None = None  # whose plan was told here
        self._rest = bytearray()  # that came after the last line

    def hold(self) -> None:
        """Hear and answer until the member leaves, which raises OSError."""
        try:
            while True:
                self._answer(parse(self._line(), VERSION))
        finally:
            if self._told is not None:
                self._cache.leave(self._told)

    def _answer(self, said: dict[str, Any]) -> None:
        job = self._user, _number(said.get("job", 0), 1 << 64)
        if "bring" in said:
            read, is_full = self._cache.bring(job, self._checked(said["bring"]))
            has_plan = self._cache.has_plan(job)
            _send(self._connection, read=read.tolist(), full=is_full, planned=has_plan)
        elif "took" in said:
            self._cache.take(job, self._ids(_number(said["took"], MOST_IDS)))
        elif "at" in said:
            self._cache.pass_by(job, _number(said["at"], 1 << 53))
        elif "plan" in said:
            self._hear_plan(job, said)
        else:
            raise ConnectionError("nothing is known of that")

    def _hear_plan(self, job: Job, said: dict[str, Any]) -> None:
        count, length = (_number(said.get(name), MOST_ACCESSES) for name in ("plan", "length"))
        if self._told not in (None, job):
            raise ConnectionError("a second plan")
        has_room = self._cache.makes_room_for_plan(job, count)
        if has_room:
            self._told = job
        _send(self._connection, send=has_room)
        if has_room:
            self._cache.tell(job, self._ids(count), length, said.get("last") is True)

    def _checked(self, given: object) -> Ids:
        try:
            ids = np.array(given, np.int64).reshape(-1)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConnectionError(f"no ids: {error}") from error
        if len(ids) > MOST_IDS or ((ids < 0) | (ids >= self._num_samples)).any():
            raise ConnectionError("ids out of range")
        return ids.astype(np.uint32)

    def _ids(self, count: int) -> Ids:
        """Return so many ids that follow a line."""
        into, done = memoryview(bytearray(4 * count)), min(4 * count, len(self._rest))
        into[:done] = self._rest[:done]
        del self._rest[:done]
        deadline = time.monotonic() + WAIT + len(into) / _SLOWEST
        while done < len(into):
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._connection.recv_into(into[done:])
            if not part:
                raise ConnectionError("ids were cut short")
            done += part
        ids = np.frombuffer(into, np.uint32)
        if count and int(ids.max()) >= self._num_samples:
            raise ConnectionError("ids out of range")
        return ids

    def _line(self) -> bytes:
        deadline = None
        while (end := self._rest.find(b"\n") + 1) == 0:
            if len(self._rest) > MAX_ANSWER:
                raise ConnectionError(f"a line of more than {MAX_ANSWER} bytes")
            # It may wait before a line, not within it.
            if self._rest and deadline is None:
                deadline = time.monotonic() + WAIT
            left = _SILENT if deadline is None else deadline - time.monotonic()
            self._connection.settimeout(max(0.001, left))
            part = self._connection.recv(MAX_ANSWER)
            if not part:
                raise ConnectionError("the line was cut short")
            self._rest += part
        line = bytes(self._rest[:end])
        del self._rest[:end]
        return line


def _number(given: object, most: int) -> int:
    if type(given) is not int or not 0 <= given <= most:
        raise ConnectionError(f"{str(given)[:40]} is no number that could be meant")
    return given


def _send(connection: socket.socket, **message: Any) -> None:
    connection.settimeout(WAIT)
    connection.sendall(line_of(**message))

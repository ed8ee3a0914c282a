"""A cache that the users of a group share on this node: a member's side.

The node's service (:mod:`stoker.jobs.group_cache`) alone writes it, and reads the files for that.
A member maps the memory to read it, takes hits from there without asking anyone, and asks for what
is not there over a Unix socket, in lines of JSON:

- ``join`` names the data set by its fingerprints; the answer is some ids to ``prove``.
- The member sends open descriptors of these files, which the kernel gives only to users who may
  read them. The answer brings a descriptor of the memory, open for reading.
- ``bring`` has ids; once the answer is there, they are too, as far as they are to be kept.

Where the cache is smaller than the folder the service keeps what some job needs soonest. So the
training process tells what it needs (:class:`Teller`), over a connection of its own:

- ``plan`` has the number of its coming accesses; their ids follow once the answer says to send.
- ``at`` says how many of these are over.

Each process that takes samples says so (``took``), without an answer. All three name the ``job`` by
a number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SegmentError, UntrustedPath
from stoker.node import descriptors
from stoker.node.descriptors import Descriptor
from stoker.node.messages import connect, parse, peer, read_line
from stoker.node.owned import TRUST, trusts_user
from stoker.pool.pool_address import socket_path
from stoker.source.base import Source
from stoker.source.files import FileSource
from stoker.source.packed import Packed, gather
from stoker.store.arena import ArenaView
from stoker.store.counters import Counters
from stoker.store.tier import Found, Ids, Keys

VERSION = 1
"""Of the messages; each says its own, as those of a job to its own service do."""
MAX_ANSWER = 1 << 16
MOST_IDS = 4096
"""Samples that are asked for at once."""
MOST_ACCESSES = 1 << 31
"""Accesses of a plan."""
MOST_PROOFS = 16
"""Files that a member shows to be allowed to read."""
WAIT = 10.0
"""Seconds that the service has for an answer; then a member reads by itself."""

log = logging.getLogger("stoker")

_AGAIN = 5.0  # seconds between two attempts to join
_FULL = 1.0  # seconds for which nothing is asked for where there was no room
_AT_ONCE = 8  # connections of a process, each for one thread at a time
_EVERY = 0.02  # seconds between two messages on how far training is
_LOOK = 1.0  # seconds between two looks whether a pool without a user is there for nothing
_FIELDS = ("pool_asked", "pool_hits", "pool_read", "pool_bytes", "pool_errors", "pool_seconds")
_LIVE: weakref.WeakSet[GroupPool] = weakref.WeakSet()


class GroupPool:
    """Samples of ``files`` in the cache that the service at the socket ``path`` has for a group.

    Looks there and has missing samples brought, waiting :data:`WAIT` seconds at most. Without a
    service, without permission to read the files, and while the service does not answer, nothing
    more is found than what is mapped already, and is asked again a few seconds later. What is
    served is trusted as far as the user of the service is: root, this user, or one named in
    ``STOKER_TRUST``. Nothing is opened before the first use, by each process for itself. Safe in
    any thread; forked children and processes that receive it by pickling share the counters.
    """

    _idle: list[socket.socket]
    _view: ArenaView | None
    _teller: Teller | None

    reads = True
    """The service reads the source for its members."""
    wants_plans = True
    """The service keeps what is needed soonest."""

    def __init__(self, path: Path, files: FileSource) -> None:
        self._path, self._files = path, files
        self._counters = Counters(_FIELDS)
        self._job = secrets.randbits(63) | 1
        self._set_up()

    def find(self, ids: Ids, keys: Keys = None) -> Found:
        """Return what is there, or was brought for this; see :class:`~stoker.store.tier.Pool`."""
        begin = time.perf_counter()
        view = self._view or self._join_first()
        fetched = np.zeros(len(ids), np.bool_)
        if view is None:
            empty = Packed(np.empty(0, np.uint8), np.zeros(len(ids) + 1, np.int64))
            return Found(empty, fetched.copy(), fetched)
        data, offsets, found = view.get_many(ids)
        samples, hits = Packed(data, offsets), int(np.count_nonzero(found))
        missing = np.flatnonzero(~found)
        if missing.size and (read := self._bring(ids[missing])) is not None:
            data, offsets, there = (self._view or view).get_many(ids[missing])
            part, index = np.zeros(len(ids), np.int64), np.arange(len(ids))
            part[missing], index[missing] = 1, np.arange(len(missing))
            samples = gather([samples, Packed(data, offsets)], part, index)
            found[missing] = there
            fetched[missing] = there & np.isin(ids[missing], read)
            hits += int(np.count_nonzero(there & ~fetched[missing]))
        if self._is_planned:
            self._say_taken(ids[found])
        self._counters.add(
            pool_asked=len(ids),
            pool_hits=hits,
            pool_read=int(np.count_nonzero(fetched)),
            pool_bytes=int(np.diff(samples.offsets)[found & ~fetched].sum()),
            pool_seconds=time.perf_counter() - begin,
        )
        return Found(samples, found, fetched)

    def offer(self, ids: Ids, samples: Packed, keys: Keys = None) -> None:
        """Do nothing: only the service writes."""

    def discard(self, ids: Ids) -> None:
        """Do nothing: what a member finds useless others may need."""

    def reorder(self, keys: NDArray[np.float64]) -> None:
        """Do nothing: what stays is up to the service."""

    def begin_plan(self, ids: Ids, length: int, *, is_last: bool) -> None:
        """Have the service told; see :meth:`stoker.store.tier.Pool.begin_plan`."""
        if self._teller is None:
            self._teller = Teller(self._job, WeakMethod(self._join))
        self._teller.plan(ids, length, is_last=is_last)

    def pass_by(self, accesses: int) -> None:
        """Have the service told that so many of the plan's accesses are over."""
        if self._teller is not None:
            self._teller.at(accesses)

    def stats(self) -> dict[str, Any]:
        """Return what this job's processes counted; ``pool_open`` is 1 while it is not joined.

        ``pool_read``: samples found that the service read for this.
        """
        counts = {
            name: value if name.endswith("_seconds") else int(value)
            for name, value in self._counters.totals().items()
        }
        away = int(self._view is None or time.monotonic() < self._not_before)
        return {"capacity_bytes": 0, "payload_bytes": 0, "entries": 0, **counts, "pool_open": away}

    def close(self) -> None:
        """Leave. May be called again."""
        teller, self._teller = self._teller, None
        if teller is not None:
            teller.close()
        with self._changed:
            links, self._idle[:] = list(self._idle), []
            self._view = None
            self._count -= len(links)
        _drop_all(links)

    def _set_up(self) -> None:
        self._changed = threading.Condition()
        self._idle = []
        weakref.finalize(self, _drop_all, self._idle).atexit = False  # of one that is not closed
        self._count = 0  # connections, those in use included
        self._view = None
        self._memory = 0  # inode of what is mapped
        self._not_before = self._full_until = 0.0
        self._has_warned = False
        self._is_planned = False  # whether the service knows what this job needs
        self._teller = None
        _LIVE.add(self)

    def _join_first(self) -> ArenaView | None:
        """Return the memory once this process has joined; None if it cannot now."""
        link = self._take(time.monotonic() + WAIT)
        if link is not None:
            self._give_back(link)
        return self._view

    def _bring(self, ids: Ids) -> Ids | None:
        """Have the service bring samples; return those it read for this, None if it did nothing."""
        if time.monotonic() < self._full_until:
            return None
        deadline = time.monotonic() + WAIT
        link = self._take(deadline)
        if link is None:
            return None
        read: list[int] = []
        try:
            for first in range(0, len(ids), MOST_IDS):
                wanted = ids[first : first + MOST_IDS].tolist()
                said = _ask(link, deadline, bring=wanted, job=self._job)
                read += said["read"]
                self._is_planned = bool(said.get("planned"))
                if said["full"]:
                    self._full_until = time.monotonic() + _FULL
        except (OSError, KeyError, TypeError) as error:
            self._lose(link, error)
            return np.array(read, np.uint32) if read else None
        self._give_back(link)
        return np.array(read, np.uint32)

    def _say_taken(self, ids: Ids) -> None:
        """Tell the service, unless that would have to wait: then it learns by the progress."""
        with self._changed:
            if not self._idle:
                return
            link = self._idle.pop()
        try:
            link.settimeout(0.0)
            for first in range(0, len(ids), MOST_IDS):
                some = ids[first : first + MOST_IDS]
                line = line_of(took=len(some), job=self._job) + some.tobytes()
                if link.send(line) < len(line):
                    raise ConnectionError("the service does not listen")
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(link, error)
            return
        self._give_back(link)

    def _take(self, deadline: float) -> socket.socket | None:
        """Return a connection for this thread, made if need be; None if there is none for now."""
        with self._changed:
            while not self._idle and self._count >= _AT_ONCE:
                if not self._changed.wait(deadline - time.monotonic()):
                    return None
            if time.monotonic() < self._not_before:
                return None
            if self._idle:
                return self._idle.pop()
            self._count += 1
        try:
            return self._join(deadline)
        except (OSError, SegmentError, KeyError, TypeError, ValueError) as error:
            self._lose(None, error)
            return None

    def _give_back(self, link: socket.socket) -> None:
        with self._changed:
            self._idle.append(link)
            self._changed.notify()

    def _lose(self, link: socket.socket | None, error: Exception) -> None:
        """Continue without the service for a while; say so once."""
        if link is not None:
            descriptors.drop(link)
        with self._changed:
            self._count -= 1
            self._not_before = time.monotonic() + _AGAIN
            self._changed.notify()
            is_first, self._has_warned = not self._has_warned, True
        self._counters.add(pool_errors=1)
        say = log.warning if is_first else log.info
        say("the cache of the group at %s is not asked for now: %s", self._path, error)

    def _join(self, deadline: float) -> socket.socket:
        """Become a member, and map the memory unless it is mapped; return the connection."""
        link = connect(self._path, WAIT, to_others=True)
        received: list[Descriptor] = []
        try:
            user = peer(link).user
            if not trusts_user(user):
                raise UntrustedPath(
                    f"it is served by user {user}: to trust that user, set {TRUST}={user}"
                )
            files = self._files
            said = _ask(
                link,
                deadline,
                ask="join",
                fingerprint=files.fingerprint,
                local=files.local_identity,
            )
            proofs = _open_all([files.name(int(sample)) for sample in said["prove"]])
            try:
                _ask(link, deadline, proofs, received, ask="map")
            finally:
                for proof in proofs:
                    os.close(proof)
            self._map(received)
        except BaseException:
            descriptors.drop(link)
            raise
        finally:
            for descriptor in received:
                descriptors.drop(descriptor)
        return link

    def _map(self, received: list[Descriptor]) -> None:
        """Map what the service sent; SegmentError if it is not a cache of these files."""
        if len(received) != 1:
            raise SegmentError(f"{len(received)} descriptors came instead of one")
        memory = received[0].fileno()
        inode = os.fstat(memory).st_ino
        with self._changed:
            if self._view is not None and inode == self._memory:
                return
            view = ArenaView(memory)
            if view.num_ids != len(self._files):
                raise SegmentError(f"the cache is one of {view.num_ids} samples")
            self._view, self._memory = view, inode

    def __getstate__(self) -> dict[str, Any]:
        own = {"path": self._path, "files": self._files, "counters": self._counters}
        return own | {"job": self._job}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._files = state["path"], state["files"]
        self._counters, self._job = state["counters"], state["job"]
        self._set_up()


class Teller:
    """Tells the service what a process of a job needs and how far it is, in a thread of its own.

    As ``job``, over a connection that ``join`` makes, until the object that has that is gone. Who
    trains never waits for it. Without a service it tries again every few seconds.
    """

    def __init__(self, job: int, join: WeakMethod[Callable[[float], socket.socket]]) -> None:
        self._job, self._join = job, join
        self._changed = threading.Condition()
        self._plan: tuple[Ids, int, bool] | None = None
        self._at = 0
        self._link: socket.socket | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="stoker-plan", daemon=True)
        self._thread.start()

    def plan(self, ids: Ids, length: int, *, is_last: bool) -> None:
        """Tell this plan from now on."""
        with self._changed:
            self._plan, self._at = (ids, length, is_last), 0
            self._changed.notify()

    def at(self, accesses: int) -> None:
        """Tell that so many of its accesses are over."""
        with self._changed:
            self._at = accesses
            self._changed.notify()

    def close(self) -> None:
        """Tell nothing more; the service forgets the plan."""
        with self._changed:
            self._is_closed = True
            if self._link is not None:
                with contextlib.suppress(OSError):
                    self._link.shutdown(socket.SHUT_RDWR)
            self._changed.notify()
        self._thread.join(_LOOK)

    def _run(self) -> None:
        told: tuple[object, int] = None, 0
        while (coming := self._await(told)) is not None:
            plan, at = coming
            try:
                if plan is not told[0]:
                    self._tell(plan)
                elif self._link is not None:
                    self._link.sendall(line_of(at=at, job=self._job))
                told = plan, at if plan is told[0] else 0
                self._pause(_EVERY)
            except (OSError, SegmentError, KeyError, TypeError, ValueError) as error:
                log.info("what is needed is not told to the group's service now: %s", error)
                self._drop()
                told = None, 0
                self._pause(_AGAIN)
        self._drop()

    def _await(self, told: tuple[object, int]) -> tuple[tuple[Ids, int, bool], int] | None:
        """Return the plan and how far it is, once that is not what was told; None at the end."""
        with self._changed:
            while not self._is_closed and self._join() is not None:
                if self._plan is not None and (self._plan is not told[0] or self._at != told[1]):
                    return self._plan, self._at
                self._changed.wait(_LOOK)
            return None

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)

    def _tell(self, plan: tuple[Ids, int, bool]) -> None:
        """Tell a plan; drop the connection if the service has no use for it."""
        deadline = time.monotonic() + WAIT
        join = self._join()
        if self._link is None and join is not None:
            self._link = join(deadline)
        if self._link is None:
            return
        ids, length, is_last = plan
        said = _ask(self._link, deadline, plan=len(ids), length=length, last=is_last, job=self._job)
        if said["send"]:
            self._link.settimeout(WAIT)
            self._link.sendall(ids.data)
        else:
            self._drop()

    def _drop(self) -> None:
        with self._changed:
            link, self._link = self._link, None
        if link is not None:
            descriptors.drop(link)


def _ask(
    link: socket.socket,
    deadline: float,
    fds: Sequence[int] = (),
    received: list[Descriptor] | None = None,
    **message: Any,
) -> dict[str, Any]:
    """Return the answer to one message; OSError if there is none in time, or it is no."""
    link.settimeout(max(0.001, deadline - time.monotonic()))
    line = line_of(**message)
    sent = socket.send_fds(link, [line], list(fds))
    link.sendall(line[sent:])
    said = parse(read_line(link, MAX_ANSWER, deadline, received), VERSION)
    if "refused" in said:
        raise ConnectionRefusedError(str(said["refused"]))
    return said


def line_of(**message: Any) -> bytes:
    """Return a message as it is sent."""
    return json.dumps({"stoker": VERSION, **message}).encode() + b"\n"


def _open_all(paths: Sequence[str]) -> list[int]:
    """Return descriptors of files, open for reading; raises OSError if one may not be read."""
    if len(paths) > MOST_PROOFS:
        raise ConnectionError(f"{len(paths)} files are to be opened")
    opened: list[int] = []
    try:
        for path in paths:
            opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))  # noqa: PERF401
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    return opened


def _drop_all(links: list[socket.socket]) -> None:
    while links:
        descriptors.drop(links.pop())


def _forget_in_child() -> None:
    for pool in list(_LIVE):
        pool._set_up()  # connections are the parent's


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True)
class GroupPlan:
    """The cache of a group, checked, not joined yet."""

    path: Path
    files: FileSource

    def open(self, *, renews: bool, takes_keys: bool) -> GroupPool:
        """Return the pool; there is nothing to renew, and keys do not matter."""
        return GroupPool(self.path, self.files)


def plan_group(url: str, size: object, source: Source | None) -> GroupPlan:
    """Return the plan for ``url``; ``source`` has what is cached as it lies in files, else None.

    Raises :class:`~stoker.errors.ConfigError` for what a group cannot share.
    """
    if size is not None:
        raise ConfigError(f"pool_size={size!r} is up to the service at {url!r}: leave it out")
    if not isinstance(source, FileSource):
        raise ConfigError(
            f"pool={url!r} has files as they are, of a folder of images: use ImageFolder with "
            "stage='encoded', or leave pool out"
        )
    return GroupPlan(socket_path(url), source)

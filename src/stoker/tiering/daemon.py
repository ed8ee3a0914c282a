"""The placement daemon, which is :func:`main`, started by :mod:`stoker.tiering.membership`.

It is given the configuration, the socket where runs become members, and the lock that says there
is a daemon, and ends with its last member. Each member is first told where the table is, or why
there is none, and gets a report on request.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.errors import StokerError
from stoker.node.messages import Channel
from stoker.node.owned import remove_socket
from stoker.node.supervised import go_to_background
from stoker.tiering.config import Config, read_order
from stoker.tiering.layout import REQUEST, REQUEST_MAGIC, Kind, Ring, create_counters
from stoker.tiering.membership import RunFolder
from stoker.tiering.placer import LARGE, Placer
from stoker.tiering.table import Settings, Table, TierPaths
from stoker.tiering.tier_dir import TierDir, check_room

log = logging.getLogger("stoker.tiering")

_BEAT = 0.2  # seconds between two signs of life
_SILENT = 30.0  # after which programs take a daemon for gone that lives but says nothing
_WAIT = 10.0  # seconds that a program waits for a copy that makes no progress
_LOOK_IN = 0.02  # seconds after which requests in the ring are looked for
_NAPS = 0.001, 0.004  # seconds between two looks at the socket while many, few requests come in
_MANY = 3  # requests at one look: the socket holds some ten
_AT_ONCE = 16  # requests off the socket before the next look at the ring
_LONGEST_REQUEST = 8192  # bytes, more than a path has
_MOST_WAITING = 1 << 17  # files that wait to be looked at
_RUSH = 50  # requests in the ring at once: the source is so fast that copying would be felt
_HOLD = 0.1  # seconds
_LOOKS_A_SECOND = 500  # at sources of placed files
_LINGER = 5.0  # seconds to wait for the first member; the last one is not outlived


class Daemon:
    """Tiers, table and placer of one source, and the members for whom they are kept."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config, self._folder = config, folder
        self.tiers: list[TierDir] = []
        try:
            for tier in config.tiers:
                self.tiers.append(TierDir(tier.path, config.source))
                check_room(self.tiers[-1], tier.quota)
            folder.clear()
            create_counters(folder.counters)
            self._ring = Ring(folder.counters)
            self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            os.fchmod(self._requests.fileno(), 0o600)
            self._requests.bind(str(folder.requests))
            self._requests.settimeout(_LOOK_IN)
            self._root = os.open(config.source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self.table = self._make_table()
            # By its descriptor: the source stays the directory that it was at the start, whatever
            # its path leads to later.
            source = Path(f"/proc/self/fd/{self._root}")
            self.placer = Placer(config, source, self.table, self.tiers)
            self.promised = self._promise()
        except BaseException:
            for open_tier in self.tiers:
                open_tier.close()
            raise
        for duty in (self._listen, self._beat, self._revalidate):
            threading.Thread(target=duty, daemon=True).start()

    def _make_table(self) -> Table:
        config = self.config
        spellings = list(dict.fromkeys([config.source, config.spelling]))
        places = [TierPaths(*tier.called, tier.dev) for tier in self.tiers]
        settings = Settings(
            small_bytes=config.small,
            large_bytes=LARGE,
            ahead_bytes=config.ahead,
            wait_ms=int(_WAIT * 1000),
            heartbeat_ms=int(_SILENT * 1000),
        )
        return Table(self._folder.table, spellings, os.fstat(self._root), places, settings)

    def _promise(self) -> dict[str, int] | None:
        """Reserve room in the given order; the table must be alive meanwhile."""
        if self.config.order is None:
            return None
        paths, skipped = read_order(self.config.order, self.config.source)
        return {
            "listed": len(paths),
            "placed": self.placer.promise(paths),
            "outside": skipped,
        }

    def _listen(self) -> None:
        """Take requests from the socket at once, as it holds few, and poll the ring."""
        busy_until, nap = 0.0, _NAPS[0]
        while True:
            taken = 0
            if time.monotonic() < busy_until and not self.config.small:
                # Waking a blocked thread would cost the program a tenth of a slow open.
                time.sleep(nap)
                self._requests.settimeout(0)
            else:
                self._requests.settimeout(_LOOK_IN)
            with contextlib.suppress(ValueError, OSError):
                for _ in range(_AT_ONCE):
                    message, handed, _, _ = socket.recv_fds(self._requests, _LONGEST_REQUEST, 4)
                    self._requests.settimeout(0)
                    taken, busy_until = taken + 1, time.monotonic() + _LOOK_IN
                    self._obey(message, [io.FileIO(fd) for fd in handed])
            nap = _NAPS[0] if taken >= _MANY else _NAPS[1]
            with contextlib.suppress(ValueError, OSError):
                # What there is no room for in the queue stays in the ring, until that is full.
                messages = self._ring.take(_MOST_WAITING - self.placer.waiting)
                if len(messages) >= _RUSH and self.placer.waiting < _MOST_WAITING // 2:
                    self.placer.hold(_HOLD)
                for message in messages:
                    self._obey(message, [])

    def _obey(self, message: bytes, handed: list[io.FileIO]) -> None:
        if len(message) < REQUEST.size:
            return
        magic, kind, source, length, entry, code = REQUEST.unpack_from(message)
        if magic != REQUEST_MAGIC or source != 0:
            return
        path = message[REQUEST.size : REQUEST.size + length]
        if kind == Kind.OPENED:
            if len(path) == length and zlib.crc32(path, source) == code and _is_inside(path):
                self.placer.opened(path, handed[0] if handed else None)
        elif kind == Kind.CHANGED and self.table.has(entry, code):  # not an older daemon's table
            self.placer.changed(entry)

    def _revalidate(self) -> None:
        """Check the sources of placed files, each once per configured interval."""
        every = min(1.0, self.config.revalidate / 4)
        most = max(1, round(_LOOKS_A_SECOND * every))
        while True:
            began = time.monotonic()
            before = time.monotonic_ns() - int((self.config.revalidate - every) * 1e9)
            for done, number in enumerate(self.table.placed_before(before, most), start=1):
                self.placer.revalidate(number)
                time.sleep(max(0.0, began + done / _LOOKS_A_SECOND - time.monotonic()))
            time.sleep(max(0.0, began + every - time.monotonic()))

    def _beat(self) -> None:
        while True:
            self.table.beat()
            time.sleep(_BEAT)

    def report(self) -> dict[str, Any]:
        """Return what has been placed so far, as JSON values; bytes and seconds."""
        counts = self.placer.counts
        tiers = [
            {"path": str(tier.path), "quota": tier.quota, "used": used, **asdict(count)}
            for tier, used, count in zip(
                self.config.tiers, self.placer.rooms.used(), counts.tiers, strict=True
            )
        ]
        return {
            "tiers": tiers,
            "refused": counts.refused,
            "failed": counts.failed,
            "dropped": counts.dropped,
            "problems": dict(counts.problems),
            "checks": counts.checks,
            "changes": counts.changes,
            "order": self.promised,
            "table_bytes": self.table.memory,
            "idle": self._ring.is_empty() and self.placer.is_idle(),
        }

    def close(self) -> None:
        """Shut down in order: programs are told first."""
        self.table.close()
        self.placer.close()
        for tier in self.tiers:
            tier.close()
        os.close(self._root)
        self._folder.clear()
        remove_socket(self._folder.members)


def _is_inside(path: bytes) -> bool:
    parts = path.split(b"/")
    return b"\0" not in path and not any(part in (b"", b".", b"..") for part in parts)


def _serve(daemon: Daemon, listener: socket.socket, members: dict[int, Channel]) -> None:
    """Answer members until there have been none for a while."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    began, patience = time.monotonic(), _LINGER
    while members or time.monotonic() - began < patience:
        for fd, _ in poll.poll(_BEAT * 1000):
            if fd == listener.fileno():
                if (channel := _admit(listener, {"config": _described(daemon.config)})) is not None:
                    members[channel.fileno()] = channel
                    poll.register(channel.fileno(), select.POLLIN)
            elif not _answer(members[fd], daemon):
                poll.unregister(fd)
                members.pop(fd).close()
        if members:
            patience = 0.0
        daemon.placer.tick()


def _admit(listener: socket.socket, greeting: dict[str, Any]) -> Channel | None:
    with contextlib.suppress(OSError):
        channel = Channel.accept(listener)
        if channel is not None:
            channel.send(greeting)
        return channel
    return None


def _answer(channel: Channel, daemon: Daemon) -> bool:
    """Answer one request of a member; False when it has disconnected."""
    try:
        received = channel.receive()
        if received is None:
            return False
        for fd in received[1]:
            os.close(fd)
        channel.send(daemon.report())
    except OSError:
        return False
    return True


def _described(config: Config) -> dict[str, Any]:
    return {
        "source": str(config.source),
        "tiers": [[str(tier.path), tier.quota] for tier in config.tiers],
    }


def main() -> None:
    """Run the daemon on what it was started with."""
    # Those signals are for the command.
    config, listener, members_path = go_to_background(signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
    folder = RunFolder(members_path.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    sys.setswitchinterval(0.001)
    listener.setblocking(False)
    try:
        daemon = Daemon(config, folder)
    except (StokerError, OSError) as error:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.poll(_LINGER * 1000)
        _admit(listener, {"error": str(error), "refused": isinstance(error, StokerError)})
        return
    members: dict[int, Channel] = {}
    try:
        _serve(daemon, listener, members)
    finally:
        daemon.close()

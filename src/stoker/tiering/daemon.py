"""The placement daemon: ``python -m stoker.tiering.daemon CONFIG FOLDER LISTENER LOCK``.

``CONFIG``, ``LISTENER`` and ``LOCK`` are descriptors: of the pickled configuration, of the socket
where runs become members, and of the lock that says there is a daemon. It ends with its last
member. Each member is told first where the table is, or why there is none, and gets
a report whenever it asks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.errors import StokerError
from stoker.prefetch.channel import Channel
from stoker.tiering.config import Config
from stoker.tiering.counters import create_counters
from stoker.tiering.free_room import check_room
from stoker.tiering.layout import REQUEST, REQUEST_MAGIC, Kind
from stoker.tiering.order import read_order
from stoker.tiering.placer import Placer
from stoker.tiering.run_folder import RunFolder
from stoker.tiering.table import Settings, Table, TierPlace
from stoker.tiering.tier_dir import TierDir

log = logging.getLogger("stoker.tiering")

_BEAT = 0.2  # seconds between two signs of life
_SILENT = 30.0  # after which programs take a daemon for gone that lives but says nothing
_WAIT = 10.0  # seconds that a program waits for a copy that makes no progress
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
            self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._requests.bind(str(folder.requests))
            self.table = self._make_table()
            self.placer = Placer(config, self.table, self.tiers)
            self.promised = self._promise()
        except BaseException:
            for open_tier in self.tiers:
                open_tier.close()
            raise
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def _make_table(self) -> Table:
        config = self.config
        spellings = list(dict.fromkeys([config.source, config.spelling]))
        places = [TierPlace(tier.copies, tier.parts, tier.dev) for tier in self.tiers]
        settings = Settings(
            revalidate_ms=min(0xFFFFFFFE, int(config.revalidate * 1000)),
            small_bytes=config.small,
            ahead_bytes=config.ahead,
            wait_ms=int(_WAIT * 1000),
            heartbeat_ms=int(_SILENT * 1000),
        )
        return Table(self._folder.table, spellings, places, settings)

    def _promise(self) -> dict[str, int] | None:
        """Reserve room in the order that was given; the table must be alive meanwhile."""
        if self.config.order is None:
            return None
        paths, skipped = read_order(self.config.order, self.config.source)
        return {
            "listed": len(paths),
            "placed": self.placer.promise(paths),
            "outside": skipped,
        }

    def _listen(self) -> None:
        """Take requests off the socket at once: it holds few."""
        while True:
            with contextlib.suppress(ValueError, OSError):
                self._obey(self._requests.recv(1 << 16))

    def _obey(self, message: bytes) -> None:
        if len(message) < REQUEST.size:
            return
        magic, kind, source, length, time_ns, entry, code = REQUEST.unpack_from(message)
        if magic != REQUEST_MAGIC or source != 0:
            return
        if kind == Kind.OPENED:
            path = message[REQUEST.size : REQUEST.size + length]
            if len(path) == length and _is_inside(path):
                self.placer.opened(path)
        elif not self.table.has(entry, code):
            return  # the program has an older daemon's table
        elif kind == Kind.CHECKED:
            self.placer.checked(entry, min(time_ns, time.monotonic_ns()))
        elif kind == Kind.CHANGED:
            self.placer.changed(entry)

    def _beat(self) -> None:
        while True:
            self.table.beat()
            time.sleep(_BEAT)

    def report(self) -> dict[str, Any]:
        """Return what has been placed so far, as JSON can have it; bytes and seconds."""
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
            "order": self.promised,
            "table_bytes": self.table.memory,
            "idle": self.placer.is_idle(),
        }

    def close(self) -> None:
        """End in good order: programs are told first."""
        self.table.close()
        self.placer.close()
        for tier in self.tiers:
            tier.close()
        self._folder.clear()
        self._folder.members.unlink(missing_ok=True)


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
    try:
        connection, _ = listener.accept()
        channel = Channel(connection)
        if channel.user() == os.geteuid():
            channel.send(greeting)
            return channel
        channel.close()
    except OSError:
        pass
    return None


def _answer(channel: Channel, daemon: Daemon) -> bool:
    """Answer one question of a member; False when it has gone."""
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
    """Run the daemon on the arguments."""
    if os.fork():  # whoever started us need not wait for our end
        os._exit(0)
    config_fd, folder = int(sys.argv[1]), RunFolder(Path(sys.argv[2]))
    listener_fd, lock_fd = int(sys.argv[3]), int(sys.argv[4])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):  # those are for the command
        signal.signal(ignored, signal.SIG_IGN)
    os.set_inheritable(lock_fd, False)
    sys.setswitchinterval(0.001)
    with os.fdopen(config_fd, "rb") as file:
        config: Config = pickle.load(file)
    listener = socket.socket(fileno=listener_fd)
    listener.setblocking(False)
    try:
        daemon = Daemon(config, folder)
    except (StokerError, OSError) as error:
        select.select([listener], [], [], _LINGER)
        _admit(listener, {"error": str(error)})
        return
    members: dict[int, Channel] = {}
    try:
        _serve(daemon, listener, members)
    finally:
        daemon.close()


if __name__ == "__main__":
    main()

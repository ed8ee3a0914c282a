"""A run's membership in the daemon of its source: find or start it, ask for reports, leave."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from stoker.errors import ConfigError, SegmentError
from stoker.node import descriptors
from stoker.node.locks import try_lock_file
from stoker.node.messages import Channel
from stoker.node.owned import remove_socket
from stoker.node.runtime_dir import existing_runtime_dir, prepare_runtime_dir
from stoker.node.supervisor import start_unless_alive
from stoker.tiering.config import SHORTAGES, Config
from stoker.tiering.layout import read_counters

_PREFIX = "tiering-"
_LONGEST_SOCKET = 107  # bytes in sockaddr_un, less the closing zero
_PATIENCE = 60.0  # seconds for a daemon that looks through tiers or a warm list
# What a report says of now, not of the time since the run began.
_STATES = frozenset({"quota", "used", "files", "refused", "table_bytes", "idle", "order"})


class RunFolder:
    """A directory in the user's runtime directory, one for each source.

    ``lock`` is held by the daemon as long as it lives; its holder may remove and make the
    other files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "lock"
        self.table = path / "table"
        self.counters = path / "counters"
        self.requests = path / "socket"
        self.members = path / "members"
        self.log = path / "log"

    @classmethod
    def of(cls, source: Path) -> RunFolder:
        """Return the folder of a source, made if necessary.

        Raises :class:`OSError` as the runtime directory does, and
        :class:`~stoker.errors.ConfigError` if its path is too long for sockets.
        """
        name = hashlib.sha256(os.fsencode(source)).hexdigest()[:16]
        folder = cls(prepare_runtime_dir() / f"{_PREFIX}{name}")
        if len(os.fsencode(folder.members)) > _LONGEST_SOCKET:
            raise ConfigError(
                f"{folder.path} is too long for sockets: set STOKER_RUNTIME_DIR to a shorter path"
            )
        folder.path.mkdir(mode=0o700, exist_ok=True)
        return folder

    def clear(self) -> None:
        """Remove the files that a daemon shares with programs; existing mappings stay valid."""
        for path in (self.table, self.counters):
            path.unlink(missing_ok=True)
        remove_socket(self.requests)

    def clean(self) -> bool:
        """Remove what a dead daemon left; False if one lives, or there is nothing."""
        left = [path for path in (self.table, self.members) if path.exists()]
        if not left or not self.lock.exists():
            return False
        lock = try_lock_file(self.lock)
        if lock is None:
            return False
        try:
            self.clear()
            remove_socket(self.members)
            return True
        finally:
            descriptors.drop(lock)


def clean() -> int:
    """Remove what dead daemons left in the runtime directory; return of how many."""
    folder = existing_runtime_dir()
    found = sorted(folder.glob(f"{_PREFIX}*")) if folder else []
    return sum(RunFolder(path).clean() for path in found)


class Membership:
    """Keeps the daemon of a source alive, started if there is none; a context manager.

    All runs of a user that read the same source share the daemon; one that asks for other tiers
    gets those of the first, with a warning. Raises :class:`~stoker.errors.ConfigError` if the
    daemon rejects the configuration, :class:`~stoker.errors.SegmentError` if it does not start, for
    example for lack of space, and :class:`OSError` if this process lacks a resource. For one
    thread.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        try:
            self.folder = RunFolder.of(config.source)
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            raise ConfigError(f"no runtime directory for the daemon: {error}") from error
        self._channel = self._join()
        self._last: dict[str, Any] = {}
        self._begin: dict[str, Any] = {}
        self._began = time.monotonic()
        self._begin = self.report()

    def environment(self) -> dict[str, str]:
        """Return what a program needs in its environment to find the table."""
        return {"STOKER_TIERING": str(self.folder.path)}

    def report(self) -> dict[str, Any]:
        """Return what happened since this run joined; see ``docs/tiering.md`` for the fields.

        If the daemon has died it is the last known report, with ``daemon`` False.
        """
        try:
            self._last = self._ask()
            alive = True
        except (OSError, ValueError):
            alive = False
        since: dict[str, Any] = _difference(self._last, self._begin)
        return since | {"daemon": alive, "seconds": time.monotonic() - self._began}

    def elsewhere(self) -> int:
        """Return how often programs found another directory at the source's path."""
        try:
            return int(read_counters(self.folder.counters, 0)["elsewhere"])
        except (OSError, ValueError):
            return 0

    def close(self) -> None:
        """Leave the daemon, which ends after its last member."""
        self._channel.close()

    def __enter__(self) -> Membership:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self) -> dict[str, Any]:
        self._channel.send({"order": "report"})
        received = self._channel.receive()
        if received is None:
            raise ConnectionError("the daemon has gone")
        placed = received[0]
        counted = read_counters(self.folder.counters, len(placed["tiers"]))
        tiers = [p | c for p, c in zip(placed["tiers"], counted.pop("tiers"), strict=True)]
        copied = sum(tier["copied_bytes"] for tier in tiers)
        source = {"path": str(self._config.source), **counted.pop("source"), "copied_bytes": copied}
        return {
            "source": source,
            **placed,
            "tiers": tiers,
            **{name: count + placed.get(name, 0) for name, count in counted.items()},
            "opens_avoided": sum(tier["opens"] for tier in tiers),
            "reads_avoided": sum(tier["reads"] for tier in tiers),
            "bytes_avoided": sum(tier["bytes"] for tier in tiers),
        }

    # --- joining ---

    def _join(self) -> Channel:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            try:
                channel = Channel.connect(self.folder.members, timeout=_PATIENCE)
            except OSError as error:
                if error.errno in SHORTAGES:
                    raise
                self._start()
                time.sleep(0.02)
                continue
            greeting = _greeting(channel)
            if greeting is not None:
                return self._joined(channel, greeting)
            channel.close()
            time.sleep(0.02)
        raise SegmentError(f"the placement daemon does not start: {self.folder.log} may say why")

    def _joined(self, channel: Channel, greeting: dict[str, Any]) -> Channel:
        if "error" in greeting:
            channel.close()
            kind = ConfigError if greeting["refused"] else SegmentError
            raise kind(greeting["error"])
        wanted = [[str(tier.path), tier.quota] for tier in self._config.tiers]
        if greeting["config"]["tiers"] != wanted:
            warnings.warn(
                "a running job's tiers of this source are used: "
                + ", ".join(f"{path}:{quota}" for path, quota in greeting["config"]["tiers"]),
                RuntimeWarning,
                stacklevel=4,
            )
        return channel

    def _start(self) -> None:
        """Start the daemon unless there is one."""
        process = start_unless_alive(
            "stoker.tiering.daemon",
            self.folder.members,
            self.folder.lock,
            lambda: self._config,
            base=_own_environment(),
            log_file=self.folder.log,
        )
        if process is not None and process.wait():
            raise SegmentError(f"the placement daemon ended at once: see {self.folder.log}")


def _greeting(channel: Channel) -> dict[str, Any] | None:
    """Return the daemon's first message; None if it was just ending."""
    try:
        received = channel.receive()
    except OSError:
        return None
    return None if received is None else received[0]


def _own_environment() -> dict[str, str]:
    """Return ours without what would redirect the daemon's own reads of the source."""
    return {name: value for name, value in os.environ.items() if name != "STOKER_TIERING"}


def _difference(now: Any, begin: Any, name: str = "") -> Any:
    """Return ``now`` with the numbers of ``begin`` subtracted; ``begin`` may lack some."""
    if name in _STATES or isinstance(now, bool | str) or now is None or begin is None:
        return now
    if isinstance(now, dict):
        return {key: _difference(value, begin.get(key), key) for key, value in now.items()}
    if isinstance(now, list):
        return [_difference(a, b, name) for a, b in zip(now, begin, strict=True)]
    return now - begin

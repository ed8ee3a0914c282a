"""A placement daemon driven by hand: a test says what is copied, when, and what bytes a copy has.

A copy with bytes other than its source's shows which of both a program read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from support.waiting import await_true

import stoker._core
from stoker.node.locks import unlock
from stoker.tiering.layout import (
    COUNTERS,
    HEADER,
    REQUEST,
    Kind,
    Ring,
    State,
    create_counters,
    offset_of,
)
from stoker.tiering.table import Settings, Table, TierPaths
from stoker.types import FileIdentity

LIBRARY = Path(
    os.environ.get("STOKER_TEST_SHIM")
    or Path(stoker._core.__file__).with_name("libstoker_preload.so")
)
SMALL = 64 << 10  # bytes: the first open of a file up to this size waits for its copy


class HandDaemon:
    """Table, counters and socket of one run, with one tier; ends when the block ends.

    With ``places`` it answers requests: whole files at once, as a good daemon would.
    """

    def __init__(self, source: Path, *, places: bool = False, **settings: int) -> None:
        self.source = source
        self.root = Path(tempfile.mkdtemp(prefix="shim-"))  # short: a socket's name is
        self.copies, self.parts = self.root / "copies", self.root / "parts"
        self.copies.mkdir()
        self.parts.mkdir()
        self.requests: list[tuple[Kind, bytes]] = []
        self._places = places
        self._lock = threading.Lock()
        self._done = threading.Event()
        limits = {
            "small_bytes": SMALL,
            "large_bytes": SMALL,
            "ahead_bytes": 1 << 30,
            "wait_ms": 10_000,
            "heartbeat_ms": 30_000,
        } | settings
        place = TierPaths(self.copies, self.parts, self.copies.stat().st_dev)
        spellings = [source, source.resolve()] if source.resolve() != source else [source]
        root = source.stat()
        self.table = Table(self.root / "table", spellings, root, [place], Settings(**limits))
        create_counters(self.root / "counters")
        self._ring = Ring(self.root / "counters")
        self.handed = 0
        """How many descriptors came with requests."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.root / "socket"))
        self._socket.settimeout(0.02)
        self._thread = threading.Thread(target=self._answer)

    def __enter__(self) -> HandDaemon:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._socket.close()
        self.table.close()
        shutil.rmtree(self.root)

    @property
    def env(self) -> dict[str, str]:
        """The environment of a program under the shim."""
        return os.environ | {"LD_PRELOAD": str(LIBRARY), "STOKER_TIERING": str(self.root)}

    def run(self, command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run a program under the shim to its end, which must be a good one."""
        options = {"env": self.env, "capture_output": True, "timeout": 120} | options
        done = subprocess.run([os.fspath(str(part)) for part in command], **options)
        assert done.returncode == 0, (done.args, done.returncode, done.stderr)
        return done

    def counted(self) -> dict[str, int]:
        """What the programs counted: of the source, of the tier, and events."""
        shards = np.fromfile(self.root / "counters", COUNTERS)[0]["shards"]
        counts = {name: int(shards[name].sum()) for name in COUNTERS["shards"].base.names[1:-1]}
        for number, name in enumerate(["source", "tier"]):
            for field in ("opens", "reads", "bytes"):
                counts[f"{name}_{field}"] = int(shards["rows"][field][:, number].sum())
        return counts

    def pause(self) -> None:
        """Answer no more, and give no more signs of life."""
        self._done.set()
        self._thread.join()

    def silence(self, seconds: float, table: str = "table") -> None:
        """Let the last sign of life be that old."""
        with (self.root / table).open("r+b") as file:
            file.seek(offset_of(HEADER, "heartbeat_ns"))
            file.write(struct.pack("=Q", time.monotonic_ns() - int(seconds * 1e9)))

    def die(self) -> None:
        """Lose the lock, as a daemon does that is killed."""
        unlock(self.table._file)

    def end(self) -> None:
        """End in order: programs read the source from now on."""
        self.pause()
        self.table.close()

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        await_true(lambda: len(self.requests) >= self.counted()["requests"], 30)

    # --- entries ---

    def place(self, name: str | bytes, content: bytes | None = None) -> int:
        """Make a file's copy complete; ``content``, of the source's size, in place of its own."""
        number = self.begin(name)
        return self.finish(number, content)

    def begin(self, name: str | bytes) -> int:
        """Begin a copy with no byte yet."""
        path = self.source / os.fsdecode(name)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        with self._lock:
            number = self.table.add(
                os.fsencode(name),
                status,
                State.WANTED,
                is_link=path.is_symlink(),
                seen_ns=time.monotonic_ns(),
            )
            part = self.parts / str(number)
            part.touch(mode=0o600)
            self.table.start_copy(number, 0, part.stat().st_ino)
        return number

    def advance(self, number: int, content: bytes) -> None:
        """Make the copy's beginning be ``content``."""
        with (self.parts / str(number)).open("r+b") as part:
            part.write(content)
        self.table.set_copied(number, len(content))

    def finish(self, number: int, content: bytes | None = None) -> int:
        """Complete a copy that was begun."""
        name = os.fsdecode(self.table.path(number))
        source, part, copy = self.source / name, self.parts / str(number), self.copies / name
        part.write_bytes(source.read_bytes() if content is None else content)
        assert part.stat().st_size == source.stat().st_size
        times = self.table.entry(number)["source_mtime_ns"]
        os.utime(part, ns=(times, times))
        copy.parent.mkdir(parents=True, exist_ok=True)
        part.rename(copy)
        self.table.set_copied(number, copy.stat().st_size)
        self.table.set_state(number, State.PLACED)
        return number

    def drop(self, number: int) -> None:
        """Take a complete copy away, as if its source had changed."""
        self.table.set_state(number, State.DROPPED)
        (self.copies / os.fsdecode(self.table.path(number))).unlink()

    def refuse(self, name: str) -> int:
        """Have a file read from the source for good."""
        status = (self.source / name).stat()
        return self.table.add(
            os.fsencode(name), status, State.REFUSED, is_link=False, seen_ns=time.monotonic_ns()
        )

    # --- inside ---

    def _answer(self) -> None:
        while not self._done.is_set():
            self.table.beat()
            messages = []
            with contextlib.suppress(TimeoutError):
                message, handed, _, _ = socket.recv_fds(self._socket, 8192, 4)
                for fd in handed:
                    self.handed += 1
                    os.close(fd)
                messages.append(message)
            for message in messages + self._ring.take(1000):
                kind, name = Kind(REQUEST.unpack_from(message)[1]), message[REQUEST.size :]
                self.requests.append((kind, name))
                if self._places:
                    self._handle(kind, name)

    def _handle(self, kind: Kind, name: bytes) -> None:
        number = self.table.find(name)
        if kind is Kind.CHANGED and number is not None:
            self._look(number)
        if kind is Kind.OPENED and (number is None or self.table.state(number) == State.DROPPED):
            try:
                self.place(name)
            except OSError:
                return  # not a file, or not to be read

    def _look(self, number: int) -> None:
        entry, seen_ns = self.table.entry(number), time.monotonic_ns()
        name = os.fsdecode(entry["path"])
        try:
            source, copy = (self.source / name).stat(), (self.copies / name).stat()
        except OSError:
            good = False
        else:
            good = FileIdentity.of(source) == entry["identity"]
            good = good and copy.st_ino == entry["copy_ino"]
        if good:
            self.table.raise_validated(number, seen_ns)
        else:
            self.table.set_state(number, State.DROPPED)

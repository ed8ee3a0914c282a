"""A real S3 stand-in that can be stopped, killed, and started again with the same objects."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

from support.s3 import Bucket
from support.servers import free_port, wait_for

from .samples import sample

# Filled before it listens, so that nobody is told that an object is not there.
_SERVE = """
import pickle, sys
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import main
storage = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
for name, objects in pickle.load(sys.stdin.buffer).items():
    storage.create_bucket(name, "us-east-1")
    for key, value in objects.items():
        storage.put_object(name, key, value)
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


def objects_of(count: int) -> dict[str, bytes]:
    """Return the first ``count`` samples by key."""
    return {f"{number:04d}": sample(number) for number in range(count)}


class S3Server:
    """A server process on a port of its own, and the buckets that were filled."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._filled: dict[str, int] = {}

    def start(self) -> None:
        """Start it, with the objects that were there before: it keeps them in memory only."""
        buckets = {name: objects_of(count) for name, count in self._filled.items()}
        command = [sys.executable, "-c", _SERVE, str(self._port)]
        # It outlives the test that starts it again, and is none of that test's processes.
        others = {k: v for k, v in os.environ.items() if k != "STOKER_RUNTIME_DIR"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=others
            )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pickle.dump(buckets, pipe)
        wait_for(self._port, self._process)

    def kill(self) -> None:
        """End it at once; connections break."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None

    def freeze(self) -> None:
        """Let it answer nothing, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def bucket(self, count: int) -> Bucket:
        """Return a new bucket with the first ``count`` samples."""
        bucket = Bucket(f"http://127.0.0.1:{self._port}")
        bucket.put(objects_of(count))
        self._filled[bucket.name] = count
        return bucket

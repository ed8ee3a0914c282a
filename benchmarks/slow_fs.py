"""A read-only FUSE view of a folder that is as slow as network storage.

``slow_fs.py ROOT MOUNTPOINT --open-ms 10 --read-ms 10 --mb-per-s 100 --iops 2000``

Each open and each read waits its latency; all reads together get the bandwidth, and all opens and
reads together the operations per second (0: no limit). The bytes are those of the files. Names and
attributes are served without delay and kept by the kernel, so that listing costs what it costs on
a client with a warm attribute cache; data is not kept by the kernel from one open to the next.
``--counts FILE`` counts opens, reads and bytes as they are asked for (see slow_counts.py).
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

from slow_counts import Counts

os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")  # libfuse 2 knows no max_threads

import mfusepy  # it chooses the library while it is imported

_THREADS = 256  # requests that may be under way; FUSE's own limit is 10
_ATTRIBUTES = (
    "st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_mtime_ns", "st_atime_ns",
    "st_ctime_ns", "st_ino",
)  # fmt: skip


class Bucket:
    """A rate that all threads share; it is paid in order of arrival."""

    def __init__(self, per_second: float) -> None:
        self._seconds_each = 1 / per_second if per_second else 0.0
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, amount: float) -> float:
        """Return the seconds until ``amount`` is paid for."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + amount * self._seconds_each
            return self._free_at - now


class SlowFolder(mfusepy.Operations):
    """The files below ``root``; see the module."""

    use_ns = True

    def __init__(
        self,
        root: Path,
        open_seconds: float,
        read_seconds: float,
        rate: float,
        iops: float,
        counts: Counts | None,
    ) -> None:
        self._root = str(root)
        self._counts = counts
        self._open_seconds, self._read_seconds = open_seconds, read_seconds
        self._bytes, self._operations = Bucket(rate), Bucket(iops)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Return the attributes of a file or folder."""
        try:
            found = os.lstat(self._root + path)
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno) from error
        return {name.removesuffix("_ns"): getattr(found, name) for name in _ATTRIBUTES}

    def readdir(self, path: str, fh: int) -> list[str]:
        """Return the names in a folder."""
        return [".", "..", *(entry.name for entry in Path(self._root + path).iterdir())]

    def open(self, path: str, flags: int) -> int:
        """Open a file, late."""
        if self._counts:
            self._counts.add(opens=1)
        time.sleep(max(self._open_seconds, self._operations.take(1)))
        return os.open(self._root + path, flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read from a file, late."""
        data = os.pread(fh, size, offset)
        if self._counts:
            self._counts.add(reads=1, bytes_=len(data))
        waits = self._bytes.take(len(data)), self._operations.take(1)
        time.sleep(max(self._read_seconds, *waits))
        return data

    def release(self, path: str, fh: int) -> int:
        """Close a file."""
        os.close(fh)
        return 0


def main() -> None:
    """Mount the view, and serve it until it is unmounted."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("root", type=Path)
    arguments.add_argument("mountpoint", type=Path)
    arguments.add_argument("--open-ms", type=float, default=10)
    arguments.add_argument("--read-ms", type=float, default=10)
    arguments.add_argument("--mb-per-s", type=float, default=100)
    arguments.add_argument("--iops", type=float, default=0)
    arguments.add_argument("--counts", type=Path)
    args = arguments.parse_args()
    folder = SlowFolder(
        args.root.resolve(),
        args.open_ms / 1e3,
        args.read_ms / 1e3,
        args.mb_per_s * 1e6,
        args.iops,
        Counts(args.counts) if args.counts else None,
    )
    mfusepy.FUSE(
        folder,
        str(args.mountpoint),
        foreground=True,
        nothreads=False,
        ro=True,
        attr_timeout=3600,
        entry_timeout=3600,
        max_threads=_THREADS,
    )


if __name__ == "__main__":
    main()

"""A program that knows nothing of Stoker: reads files in random order, changes its own, checks all.

Started under ``stoker run`` as ``campaign_reader.py ROOT BOARD SEED``; ``BOARD`` is a file with the
row that :class:`campaign_job.Column` describes. Ends with status 0 when the campaign says so.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
from campaign_data import NUM, Column, file_name, label, sample

_OWN = 12  # files that the program itself writes, below the source


def _read(path: str, way: int) -> bytes:
    """Return the bytes of a file, read in one of several ways."""
    if way == 0:
        with Path(path).open("rb") as file:
            return file.read()
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if way == 1:
            return b"".join(os.pread(fd, 4096, at) for at in range(0, size, 4096))
        if way == 2 and size:
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
                return bytes(mapped)
        return os.read(fd, size)
    finally:
        os.close(fd)


class Reader:
    """Reads and checks until it is told to end."""

    def __init__(self, root: Path, row: np.ndarray, seed: int) -> None:
        self._root, self._row, self._draw = root, row, random.Random(seed)
        self._own = {f"{root}/00/own-{number:02d}.jpg": -1 for number in range(_OWN)}

    def run(self) -> None:
        """Read epoch after epoch."""
        self._row[Column.JOINED] = 1
        for path in self._own:
            self._write(path)
        epoch = 0
        while not 0 <= self._row[Column.LAST_EPOCH] <= epoch:
            order = self._draw.sample(range(NUM), NUM)
            self._in_child(order[: NUM // 4])
            for index in order[NUM // 4 :]:
                self._check(index)
                if self._draw.random() < 0.1:
                    self._change(self._draw.choice(list(self._own)))
            epoch += 1
            self._row[Column.EPOCH] = epoch

    def _patiently(self, act, *arguments):
        """Return ``act(*arguments)``, tried again while there are no descriptors."""
        while True:
            try:
                return act(*arguments)
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                time.sleep(0.01)

    def _check(self, index: int) -> None:
        path = f"{self._root}/{file_name(index)}"
        data = self._patiently(_read, path, self._draw.randrange(4))
        self._verify(path, data, sample(index))
        if self._patiently(os.stat, path).st_size != len(data):
            self._say(f"{path}: stat tells another size", Column.WRONG_BYTES)
        if int(Path(path).parent.name) != label(index):
            self._say(f"{path}: wrong label", Column.WRONG_LABELS)
        self._row[Column.BEAT] += 1

    def _verify(self, path: str, data: bytes, truth: bytes) -> None:
        if data != truth:
            self._say(f"{path}: {len(data)} bytes {data[:16].hex()}, not {truth[:16].hex()}")

    def _say(self, what: str, column: Column = Column.WRONG_BYTES) -> None:
        self._row[column] += 1
        print(what, flush=True)

    def _in_child(self, indices: list[int]) -> None:
        pid = self._patiently(os.fork)
        if not pid:
            status = 1
            try:
                for index in indices:
                    self._check(index)
                for path, version in self._own.items():
                    self._expect(path, version)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        if status and not os.WIFSIGNALED(status):
            raise RuntimeError(f"a child ended with status {status}")

    # --- files of its own ---

    def _truth(self, path: str, version: int) -> bytes:
        number = int(path[-6:-4])
        return sample(number + version % 7, version)

    def _write(self, path: str) -> None:
        version = self._own[path] = self._own[path] + 1
        part = f"{path}.part"

        def put() -> None:
            with Path(part).open("wb") as file:
                file.write(self._truth(path, version))
            Path(part).replace(path)

        self._patiently(put)

    def _expect(self, path: str, version: int) -> None:
        try:
            data = self._patiently(_read, path, self._draw.randrange(4))
        except FileNotFoundError:
            if version >= 0:
                self._say(f"{path}: not found")
            return
        if version < 0:
            self._say(f"{path}: opened, but it was removed")
        else:
            self._verify(path, data, self._truth(path, version))

    def _change(self, path: str) -> None:
        """Change a file of its own, or only read it; what is read then is what was written."""
        way, version = self._draw.randrange(5), self._own[path]
        if way == 0:
            self._write(path)
        elif way == 1 and version >= 0:
            self._own[path] = version + 1

            def rewrite() -> None:
                with Path(path).open("wb") as file:
                    file.write(self._truth(path, version + 1))

            self._patiently(rewrite)
        elif way == 2 and version >= 0:
            Path(path).unlink()
            self._expect(path, -1)
            self._write(path)
        self._expect(path, self._own[path])


def main() -> None:
    """Read as the command line says."""
    root, board, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with board.open("r+b") as file:
        row = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
    Reader(root, row, seed).run()


if __name__ == "__main__":
    main()

"""No regret: where Stoker is slower than torch's DataLoader, or busier, and by how much.

Forty cells, a fraction of all combinations of

- storage: files in the page cache; the same dropped from it before each epoch (disk); behind FUSE
  with half of 2 ms or 20 ms an open and half a read; objects of nginx on this machine, unthrottled
  (http) and behind a proxy of 1 ms each way and 1,000, 250 and 60 MB/s;
- samples of about 2 KB, 110 KB and 1 MB: JPEGs;
- 0, 2 and 4 workers;
- compute: none (n), where bytes are collated as they are; as long as torch's DataLoader takes for
  its epoch (balanced, e); twice as long (bound, b). In the latter two samples are decoded, and the
  accelerator sleeps.

In each, torch's DataLoader, reading with obstore from web servers, and Stoker's Loader as it is by
default with a cache of 20 %, both with the same decoder and collate function, three epochs in a
process of their own, in interleaved rounds. Seconds and CPU seconds of the whole process tree: of
the first epoch with everything that is started for it, and of later ones; the CPU seconds of later
ones include the end. Servers and FUSE are not counted, though they share the processors; the proxy
itself may not reach 1,000 MB/s.

Each run is a line of ``rounds.jsonl`` in ``--output``, and is not repeated when the benchmark is
run again. It draws ``no_regret.svg`` there from all lines.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from feed_process import run_alone
from feed_servers import Unavailable, slow_folder, slow_line, web_server
from harness import parser, show
from no_regret_loaders import Task, through_stoker, through_torch
from no_regret_map import ALONE, COMPUTE, draw, table
from PIL import Image

STORAGES = {  # seconds of a read, bytes a second
    "page-cache": (2e-5, 4e9),
    "disk": (1e-4, 1e9),
    "posix-2ms": (2e-3, 1e9),
    "posix-20ms": (2e-2, 1e9),
    "http": (8e-4, 1e9),
    "http-1000": (4e-3, 3e8),
    "http-250": (4e-3, 2.5e8),
    "http-60": (4e-3, 6e7),
}
SIZES = {"2KB": (2_000, 64), "110KB": (110_000, 16), "1MB": (1_000_000, 8)}  # and of a batch
WORKERS = (0, 2, 4)
CONTESTANTS: dict[str, Callable[[Task], dict[str, Any]]] = {
    "torch": through_torch,
    "stoker": through_stoker,
}
_MORE = (
    *("page-cache/2KB/2/none", "page-cache/110KB/0/balanced", "page-cache/110KB/2/none"),
    *("page-cache/110KB/4/none", "disk/2KB/2/none", "disk/2KB/4/none", "http/110KB/2/none"),
)
_DECODING = 1.5e-8  # seconds a byte, about
_EPOCH_S = 2.0  # that an epoch of torch's should take, about
_MOST = {"2KB": 24_000, "110KB": 3_200, "1MB": 480}


@dataclass(frozen=True)
class Cell:
    """One combination."""

    storage: str
    size: str
    workers: int
    compute: str

    def __str__(self) -> str:
        return f"{self.storage}/{self.size}/{self.workers}/{self.compute}"

    @property
    def samples(self) -> int:
        """How many make an epoch, so that it takes torch a few seconds."""
        wait, line = STORAGES[self.storage]
        size, batch = SIZES[self.size]
        ways = max(1, self.workers)
        seconds = wait / ways + size / line
        if self.compute != "none":
            seconds += size * _DECODING / min(2, ways)
        least = 4 * ways * batch
        return int(np.clip(_EPOCH_S / seconds, least, _MOST[self.size])) // batch * batch


def design() -> list[Cell]:
    """Return the forty cells."""
    cells = []
    for i, storage in enumerate(STORAGES):
        for j, size in enumerate(SIZES):
            for k, workers in enumerate(WORKERS):
                if (i + j + k) % 2 == 0:
                    compute = tuple(COMPUTE)[(i + j + k) % 3]
                    cells.append(Cell(storage, size, workers, compute))
    for name in _MORE:
        storage, size, workers, compute = name.split("/")
        cells = [cell for cell in cells if not str(cell).startswith(name.rpartition("/")[0])]
        cells.append(Cell(storage, size, int(workers), compute))
    return cells


class Storages:
    """The samples and what serves them, each started when it is first needed."""

    def __init__(self, stack: contextlib.ExitStack, smoke: bool) -> None:
        self._stack = stack
        self._root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-bench-")))
        self._root.chmod(0o755)  # nginx's workers are another user's
        self._most = dict.fromkeys(_MOST, 64) if smoke else _MOST
        self._far: dict[str, Path] = {}
        self._lines: dict[str, int] = {}
        self._written: set[str] = set()

    def task(self, cell: Cell) -> Task:
        """Return what is to be read in ``cell``, which is in the page cache from now on."""
        folder = self._samples(cell.size)
        count, batch = min(cell.samples, self._most[cell.size]), SIZES[cell.size][1]
        names = tuple(f"{index:05d}.jpg" for index in range(count))
        for name in names:
            (folder / name).read_bytes()
        task = Task(str(folder), names, batch, cell.workers, decodes=cell.compute != "none")
        if cell.storage == "disk":
            return replace(task, cold=str(folder))
        if cell.storage.startswith("posix"):
            return replace(task, place=str(self._slow(cell.storage) / cell.size))
        if cell.storage.startswith("http"):
            return replace(task, place=f"http://127.0.0.1:{self._line(cell.storage)}/{cell.size}")
        return task

    def _samples(self, size: str) -> Path:
        """Write the samples of a size, of which twenty differ."""
        folder = self._root / size
        if size not in self._written:
            folder.mkdir()
            images = [jpeg(SIZES[size][0], seed) for seed in range(20)]
            for index in range(self._most[size]):
                (folder / f"{index:05d}.jpg").write_bytes(images[index % len(images)])
            self._written.add(size)
        return folder

    def _slow(self, storage: str) -> Path:
        if storage not in self._far:
            half = STORAGES[storage][0] / 2 * 1e3
            far = self._stack.enter_context(slow_folder(self._root, half, half, 0, 0))
            self._far[storage] = far
        return self._far[storage]

    @cached_property
    def _web(self) -> int:
        return self._stack.enter_context(web_server(self._root))

    def _line(self, storage: str) -> int:
        _, _, rate = storage.partition("-")
        if not rate:
            return self._web
        if storage not in self._lines:
            self._lines[storage] = self._stack.enter_context(slow_line(self._web, 1, float(rate)))
        return self._lines[storage]


def jpeg(size: int, seed: int) -> bytes:
    """Return an image of about so many bytes."""
    side = int((size / 0.55) ** 0.5)
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, side // 4),) * 2 + (3,), np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


class Book:
    """What was measured, a line of a file each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        """``cell``, ``samples``, ``round``, ``who`` and its figures."""
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def has(self, **key: Any) -> bool:
        """Whether there is a line with these values."""
        return any(key.items() <= line.items() for line in self.lines)

    def find(self, **key: Any) -> dict[str, Any]:
        """Return the first line with these values."""
        return next(line for line in self.lines if key.items() <= line.items())

    def add(self, **line: Any) -> None:
        """Append a line."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def measure(
    cells: list[Cell], rounds: int, storages: Storages, book: Book, deadline: float
) -> Iterator[str]:
    """Run what the book has not yet, a round of all cells after the other; yield remarks."""
    missing: set[str] = set()
    for number in range(rounds):
        for cell in cells:
            names = list(CONTESTANTS) if number % 2 else list(reversed(CONTESTANTS))
            key = {"cell": str(cell), "samples": cell.samples, "round": number}
            left = [name for name in names if not book.has(**key, who=name)]
            if not left or cell.storage in missing:
                continue
            if time.monotonic() > deadline:
                yield "the budget is spent: run it again to resume"
                return
            try:
                task = storages.task(cell)
            except Unavailable as reason:
                missing.add(cell.storage)
                yield f"{cell.storage} left out: {reason}"
                continue
            task = replace(task, rate=_rate(cell, task, book))
            for name in left:
                book.add(**key, who=name, **run_alone(CONTESTANTS[name], task))


def _rate(cell: Cell, task: Task, book: Book) -> float:
    """Return the samples a second of the accelerator, from what torch does without one."""
    if not COMPUTE[cell.compute]:
        return 0.0
    key = {"cell": str(cell), "samples": cell.samples, "who": ALONE}
    if not book.has(**key):
        book.add(**key, **run_alone(through_torch, task))
    seconds = float(np.median(book.find(**key)["epoch_s"][1:])) * COMPUTE[cell.compute]
    return len(task.names) / seconds


def main() -> None:
    """Parse the arguments, measure what is left, print the table and draw the map."""
    arguments = parser(__doc__)
    arguments.add_argument("--cells", nargs="+", help="patterns, as http*/2KB/*; default all")
    arguments.add_argument("--budget", type=float, default=np.inf, help="minutes to start runs in")
    arguments.add_argument("--output", type=Path, help="folder of rounds and map; default: none")
    arguments.set_defaults(rounds=5)
    args = arguments.parse_args()
    patterns = args.cells or (["page-cache/2KB/*"] if args.smoke else ["*"])
    cells = [c for c in design() if any(fnmatch.fnmatch(str(c), p) for p in patterns)]
    with contextlib.ExitStack() as stack:
        if args.output is None:
            args.output = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args.output.mkdir(parents=True, exist_ok=True)
        book = Book(args.output / "rounds.jsonl")
        deadline = time.monotonic() + 60 * args.budget
        storages = Storages(stack, args.smoke)
        remarks = list(measure(cells, args.rounds, storages, book, deadline))
        _show(cells, book, remarks, args)


def _show(cells: list[Cell], book: Book, remarks: list[str], args: argparse.Namespace) -> None:
    names = {str(cell): cell.samples for cell in cells}
    lines = [line for line in book.lines if names.get(line["cell"]) == line["samples"]]
    report = table(lines, args.smoke)
    report.remarks += remarks
    try:
        draw(lines, args.output / "no_regret.svg", list(STORAGES), list(SIZES), list(WORKERS))
    except ImportError:
        report.remarks.append("no map: pip install matplotlib")
    show(args, report, runs=lines)


if __name__ == "__main__":
    main()

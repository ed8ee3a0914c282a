"""Ten million ids: time to create an arena and to attach to it, private memory of a worker.

The data set has that many samples but no bytes worth speaking of: what is measured is everything
that grows with the number of ids. A worker's private memory is what belongs to it alone while it
serves batches. A worker started by spawn loads torch again, so its target
is what comes on top of a plain torch worker over the same number of ids.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from typing import Any

import numpy as np
from harness import Report, parser, private_bytes, show
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.shared import SharedArray
from stoker.source.base import BaseSource

MIB = 1 << 20


class CountedSource(BaseSource):
    """``count`` samples of 8 bytes, each its own id, made when they are read."""

    def __init__(self, count: int) -> None:
        sizes = SharedArray.create(count, np.int64, name="sizes")
        sizes.array.fill(8)
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes.array)

    @property
    def sizes(self) -> np.ndarray:
        """i64[N], all 8."""
        return self._sizes.array

    @property
    def fingerprint(self) -> str:
        """The count says it all."""
        return f"counted-{len(self)}"

    def read(self, ids: Any) -> list[bytes]:
        """Return each id as 8 bytes."""
        return [int(i).to_bytes(8, "little") for i in np.asarray(ids)]


class Plain(Dataset[bytes]):
    """What torch needs at the very least: the floor for a worker's memory."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> bytes:
        return index.to_bytes(8, "little")


def main() -> None:
    """Parse the arguments, measure each count, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--counts", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000]
    )
    arguments.add_argument("--start-methods", nargs="+", default=["fork", "spawn"])
    args = arguments.parse_args()
    if args.smoke:
        args.counts, args.start_methods = [10_000, 20_000], ["fork"]
    counts = args.counts
    report = Report("Everything that grows with the number of ids", args.smoke)
    private: dict[tuple[str, int, bool], float] = {}
    for count in counts:
        create, attach = arena_times(count, repeats=2 if args.smoke else 5)
        row: dict[str, Any] = {"ids": count, "create_s": create, "attach_ms": 1000 * attach}
        for method in args.start_methods:
            for plain in (False, True):
                used = private[method, count, plain] = worker_memory(count, method, plain) / MIB
                row[f"{method}_{'torch' if plain else 'stoker'}_MiB"] = used
        report.row(**row)
    first, last = counts[0], counts[-1]
    report.target(f"create, {last:,} ids", create, 5, "s")
    report.target(f"attach, {last:,} ids", 1000 * attach, 50, "ms")
    for method in args.start_methods:
        used = private[method, last, False]
        if method == "fork":
            report.target(f"private memory of a fork worker, {last:,} ids", used, 60, "MiB")
        on_top = used - private[method, last, True]
        report.target(f"{method} worker on top of a plain one, {last:,} ids", on_top, 60, "MiB")
        growth = used - private[method, first, False]
        report.target(f"{method} worker, growth from {first:,} ids", growth, 5, "MiB")
    show(args, report)


def arena_times(count: int, repeats: int) -> tuple[float, float]:
    """Return the median seconds to create an arena for ``count`` ids, and to attach to it."""
    creates, attaches = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        arena = stoker.Arena(count, 64 * MIB, mean_size=8)
        creates.append(time.perf_counter() - started)
        handle = arena.handle
        started = time.perf_counter()
        other = stoker.Arena.attach(handle)
        attaches.append(time.perf_counter() - started)
        other.close()
        arena.close()
    return statistics.median(creates), statistics.median(attaches)


def worker_memory(count: int, method: str, plain: bool) -> int:
    """Return the private bytes of a loader's worker after it has served 200 batches."""
    # A process of its own: a forked worker shares with its parent what the parent has touched.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve_and_measure, args=(count, method, plain, sender))
    process.start()
    sender.close()  # ours, so that recv() fails rather than hangs when the process dies
    measured: int = receiver.recv()
    process.join()
    return measured


def _serve_and_measure(count: int, method: str, plain: bool, sender: Any) -> None:
    options: dict[str, Any] = {
        "batch_size": 256,
        "num_workers": 1,
        "collate_fn": len,
        "multiprocessing_context": method,
    }
    if plain:
        # No shuffling: torch would draw a list of ten million Python integers.
        loader: Any = DataLoader(Plain(count), **options)
    else:
        dataset = stoker.SampleDataset(CountedSource(count))
        loader = stoker.Loader(dataset, cache=32 * MIB, recipe="lru", **options)
    batches = min(200, len(loader) - 1)
    iterator = iter(loader)  # its end would be that of the workers
    for _ in range(batches):
        next(iterator)
    sender.send(max(private_bytes(child.pid) for child in multiprocessing.active_children()))
    del iterator
    if not plain:
        loader.close()


if __name__ == "__main__":
    main()

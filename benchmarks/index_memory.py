"""Memory, recall and time of the neighbour index that graph scores search, at a million vectors.

Vectors come batch by batch, in classes that overlap; then a quarter of them move within their
classes, after which the graph is rebuilt. Memory is what this process grows by: its private pages
now, and its resident ones at most so far.
"""

from __future__ import annotations

import os
import resource
import time

import numpy as np
from harness import Report, parser, private_bytes, show

from stoker.importance.knn import HnswIndex, VectorTable

CHUNK = 10_000
NEAREST, NEIGHBORS, QUERIES = 50, 501, 128


def main() -> None:
    """Parse the arguments, fill and rebuild an index, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--vectors", type=int, default=1_000_000)
    arguments.add_argument("--dimension", type=int, default=64)
    args = arguments.parse_args()
    count, dimension = (2000, 8) if args.smoke else (args.vectors, args.dimension)
    report = Report(f"HNSW over {count} vectors of dimension {dimension}", args.smoke)
    rng = np.random.default_rng(0)
    centres = 2 * rng.standard_normal((100, dimension), dtype=np.float32)
    table = VectorTable(count)
    index = HnswIndex(table)
    base, least = private_bytes(os.getpid()), peak_bytes()

    def put(ids: np.ndarray) -> None:
        vectors = centres[ids % len(centres)] + rng.standard_normal(
            (len(ids), dimension), dtype=np.float32
        )
        index.changed(table.put(ids, vectors))

    def row(what: str, begin: float) -> None:
        seconds, memory = time.perf_counter() - begin, private_bytes(os.getpid()) - base
        queries = table.vectors[rng.choice(count, min(QUERIES, count), replace=False)]
        begin = time.perf_counter()
        index.search(queries, NEIGHBORS)
        report.row(
            after=what,
            seconds=seconds,
            **{
                "bytes a vector": memory / count,
                "at most so far": (peak_bytes() - least) / count,
                "of them the table": 4 * dimension,
                f"ms to search {len(queries)}": 1e3 * (time.perf_counter() - begin),
                f"recall of {NEAREST}": index.recall(NEAREST, NEIGHBORS),
            },
        )

    begin = time.perf_counter()
    for ids in np.array_split(np.arange(count, dtype=np.uint32), max(count // CHUNK, 1)):
        put(ids)
    row("all have come", begin)
    begin = time.perf_counter()
    put(np.arange(count // 4 + 1, dtype=np.uint32))
    row("a quarter has moved, a rebuild begins", begin)
    index.wait()
    row("the rebuild", begin)
    report.remarks.append(f"{index.rebuilds} rebuild")
    index.close()
    show(args, report)


def peak_bytes() -> int:
    """Return the bytes that were resident at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()

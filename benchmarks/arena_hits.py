"""Time of a cache hit, after the whole cache has been turned over ten times by mixed sizes.

Reads batches of cached samples of 3 KB (256 a batch) and of 110 KB (64 a batch) from an arena whose
set is many times the processor's last-level cache, against a plain memcpy of the same bytes, LMDB
on /dev/shm and pipelined GETs of a Redis server, all in the same interleaved rounds.
"""

from __future__ import annotations

import contextlib
import time

import churn
import numpy as np
import peers
from harness import Report, interleave, paired_ratio, parser, show


def main() -> None:
    """Parse the arguments, measure both sizes, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--capacity-mib", type=int, default=1024, help="payload bytes in MiB")
    arguments.add_argument("--turnovers", type=float, default=10, help="of the whole cache, before")
    args = arguments.parse_args()
    capacity = (32 if args.smoke else args.capacity_mib) << 20
    rounds = 2 if args.smoke else args.rounds
    report = Report("A hit, after ten turnovers with mixed sizes", args.smoke)
    small = measure(capacity, args.turnovers, churn.SMALL, 256, rounds, report)
    large = measure(capacity, args.turnovers, churn.LARGE, 64, rounds, report)
    harsh = measure(capacity, args.turnovers, churn.LARGE, 64, rounds, report, harsh=True)
    report.target("3 KB hit", 1e6 * float(np.median(small["arena"])), 0.6, "µs a sample")
    if "LMDB" in small:
        report.target("3 KB hit to LMDB", paired_ratio(small["arena"], small["LMDB"]), 0.5)
    if "Redis" in small:
        report.target("3 KB hit to Redis", paired_ratio(small["arena"], small["Redis"]), 0.2)
    # The same bytes in the same kind of memory; private memory has larger pages, see peers.py.
    for name, figures in (("110 KB hit", large), ("110 KB hit, harsh mix", harsh)):
        shared = paired_ratio(figures["arena"], figures["memcpy, shared memory"])
        report.target(f"{name} to memcpy", shared, 1.3)
        private = paired_ratio(figures["arena"], best_memcpy(figures))
        report.remarks.append(f"{name} to the best memcpy out of private memory: {private:.3g}")
    show(args, report)


def best_memcpy(figures: dict[str, list[float]]) -> list[float]:
    """Return, round by round, the faster of the two ways to copy: no cache beats the better one."""
    return [
        min(pair) for pair in zip(figures["memcpy"], figures["memcpy, new memory"], strict=True)
    ]


def measure(
    capacity: int,
    turnovers: float,
    size: int,
    batch: int,
    rounds: int,
    report: Report,
    harsh: bool = False,
) -> dict[str, list[float]]:
    """Return seconds a sample by contestant and round; adds one row a contestant to the report."""
    mixed = churn.Churn.create(capacity, turnovers, None if harsh else size)
    cached = mixed.cached(size)
    samples = mixed.rng.integers(0, 256, (len(cached), size), dtype=np.uint8)
    arena = mixed.arena

    def read_arena(index: np.ndarray) -> object:
        return arena.get_many(cached[index])

    readers: dict[str, peers.Reader] = {"arena": read_arena}
    with contextlib.ExitStack() as stack:
        for name, peer in (
            ("memcpy", peers.memcpy),
            ("memcpy, new memory", peers.memcpy_fresh),
            ("memcpy, shared memory", peers.memcpy_shared),
            ("LMDB", peers.lmdb_shm),
            ("Redis", peers.redis_pipeline),
        ):
            try:
                readers[name] = stack.enter_context(peer(samples))
            except peers.Unavailable as reason:
                report.remarks.append(str(reason))
        # One pass over the set, in a fresh random order.
        batches = len(cached) // batch

        def timed(read: peers.Reader) -> float:
            order = mixed.rng.permutation(len(cached))[: batches * batch].reshape(batches, -1)
            started = time.perf_counter()
            for index in order:
                read(index)
            return (time.perf_counter() - started) / order.size

        results = interleave({n: lambda r=r: timed(r) for n, r in readers.items()}, rounds)
    found = arena.get_many(cached[:batch])[2]
    if not found.all():
        raise SystemExit("the arena lost samples that nothing evicted")
    arena.verify()
    arena.close()
    for name, figures in results.items():
        report.row(
            size=f"{size // 1024} KB" + (", harsh mix" if harsh else ""),
            batch=batch,
            contestant=name,
            us_per_sample=1e6 * float(np.median(figures)),
            to_memcpy=paired_ratio(figures, best_memcpy(results)),
            set_MiB=samples.nbytes >> 20,
        )
    return results


if __name__ == "__main__":
    main()

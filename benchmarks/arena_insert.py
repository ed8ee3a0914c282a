"""Time of an insert that has to evict, into memory that was touched before.

The arena has been turned over ten times by mixed sizes, then twice by samples of the measured size,
so that free space is fragmented and each insert evicts about one sample. Compared with a plain
memcpy of the same bytes to random places of a buffer as large as the cache.
"""

from __future__ import annotations

import time

import churn
import numpy as np
from harness import Report, interleave, paired_ratio, parser, show


def main() -> None:
    """Parse the arguments, measure both sizes, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--capacity-mib", type=int, default=512, help="payload bytes in MiB")
    arguments.add_argument("--turnovers", type=float, default=10, help="of the whole cache, before")
    args = arguments.parse_args()
    capacity = (32 if args.smoke else args.capacity_mib) << 20
    rounds = 2 if args.smoke else args.rounds
    report = Report("An insert that evicts, after ten turnovers with mixed sizes", args.smoke)
    small = measure(capacity, args.turnovers, churn.SMALL, 256, rounds, report)
    large = measure(capacity, args.turnovers, churn.LARGE, 64, rounds, report)
    report.target("3 KB insert", 1e6 * float(np.median(small["arena"])), 3, "µs a sample")
    report.target("110 KB insert to memcpy", paired_ratio(large["arena"], large["memcpy"]), 2)
    show(args, report)


def measure(
    capacity: int, turnovers: float, size: int, batch: int, rounds: int, report: Report
) -> dict[str, list[float]]:
    """Return seconds a sample by contestant and round; adds one row a contestant to the report."""
    mixed = churn.Churn.create(capacity, turnovers, size, extra=size)
    same = np.arange(len(mixed.sizes) - 3 * capacity // size, len(mixed.sizes), dtype=np.uint32)
    mixed.turn_over(same, 2)
    slots = np.zeros((capacity // size, size), np.uint8)
    slots.fill(1)
    batches = max(1, (capacity // size // 4) // batch)

    def arena() -> float:
        seconds, count = insert_some(mixed, same, batch, batches)
        return seconds / count

    def memcpy() -> float:
        seconds = 0.0
        for _ in range(batches):
            index = mixed.rng.permutation(len(slots))[:batch]
            source = mixed.batch(same[:batch])[0].reshape(-1, size)
            started = time.perf_counter()
            slots[index] = source
            seconds += time.perf_counter() - started
        return seconds / (batches * batch)

    before = mixed.arena.stats()
    results = interleave({"arena": arena, "memcpy": memcpy}, rounds)
    after = mixed.arena.stats()
    mixed.arena.verify()
    inserts = after["inserts"] - before["inserts"]
    for name, figures in results.items():
        report.row(
            size=f"{size // 1024} KB",
            batch=batch,
            contestant=name,
            us_per_sample=1e6 * float(np.median(figures)),
            to_memcpy=paired_ratio(figures, results["memcpy"]),
            evictions_an_insert=(
                (after["evictions"] - before["evictions"]) / inserts if name == "arena" else None
            ),
        )
    return results


def insert_some(
    mixed: churn.Churn, same: np.ndarray, batch: int, batches: int
) -> tuple[float, int]:
    """Insert samples that are not cached; returns (seconds inside put_many, samples inserted)."""
    absent = mixed.rng.permutation(same[~mixed.arena.contains(same)])[: batches * batch]
    seconds = 0.0
    for ids in absent.reshape(-1, batch):
        data, keys = mixed.batch(ids), mixed.keys(ids)
        started = time.perf_counter()
        admitted = mixed.arena.put_many(ids, data, keys=keys)
        seconds += time.perf_counter() - started
        if not admitted.all():
            raise SystemExit("an insert was turned down in an arena that admits always")
    return seconds, len(absent)


if __name__ == "__main__":
    main()

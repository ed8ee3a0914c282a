"""A training job that takes a step for each line it reads, and writes a line about it.

``stepping_job.py POOL NUM_WORKERS PREFETCH_BYTES``. A line has the samples of the batch, none where
an epoch is over, the seconds that the loop waited, and the counts so far.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from support.numbered import slow_dataset

from stoker import Cache
from stoker.pytorch import Loader


def main() -> None:
    pool, num_workers, ahead = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with Loader(
        slow_dataset(),
        batch_size=16,
        num_workers=num_workers,
        cache=Cache("10%", pool=pool, prefetch=ahead),
    ) as loader:
        iterator = iter(loader)
        while sys.stdin.readline():
            begin = time.monotonic()
            batch = next(iterator, None)
            line = {
                "samples": [] if batch is None else [int(i) for i in batch],
                "seconds": time.monotonic() - begin,
                "stats": dataclasses.asdict(loader.stats),
            }
            print(json.dumps(line, default=float), flush=True)
            if batch is None:
                iterator = iter(loader)


if __name__ == "__main__":
    main()

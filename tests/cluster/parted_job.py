"""A rank of a training job of two that waits in the midst of its first epoch.

``parted_job.py RANK ADDRESS TIMEOUT``: ADDRESS is where rank 0 is, TIMEOUT that of the process
group in seconds. Writes a line and goes on once it has read one.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import numpy as np
from support.parts import number_of, numbers
from torch import distributed

from stoker import Cache
from stoker.pytorch import Loader, SampleDataset


def main() -> None:
    rank, address, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    distributed.init_process_group(
        "gloo",
        f"tcp://{address}:29500",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout),
    )
    dataset = SampleDataset(numbers(100), number_of)
    with Loader(
        dataset, batch_size=10, recipe="shade", cache=Cache("20%", prefetch=0), return_meta=True
    ) as loader:
        for epoch in range(2):
            for step, (_, meta) in enumerate(loader):
                loader.observe(meta.ids.astype(np.float32), meta=meta)
                if (epoch, step) == (0, 2):
                    print("there", flush=True)
                    sys.stdin.readline()
            print(f"epoch {epoch} is over", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""The training job that benchmarks/nodes.py runs under torchrun; writes a line per epoch.

``nodes_job.py DATA OUTPUT EPOCHS BATCH CACHE LOCALITY COMPUTE_MS``
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import stoker
from stoker.source import FileSource

SEEN = 4096
"""Bytes of a sample that the network looks at."""


def head(raw: bytes) -> Any:
    return torch.from_numpy(np.frombuffer(raw, np.uint8, SEEN).copy())


def sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def main() -> None:
    data, output = Path(sys.argv[1]), Path(sys.argv[2])
    epochs, batch = int(sys.argv[3]), int(sys.argv[4])
    cache, locality, compute = sys.argv[5], sys.argv[6] == "1", float(sys.argv[7]) / 1e3
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = distributed.get_rank()
    files = sorted(data.glob("*.bin"))
    dataset = stoker.SampleDataset(FileSource(files), head)
    network = torch.nn.Sequential(
        torch.nn.Linear(SEEN, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    model = DistributedDataParallel(network)
    lines = []
    kept = stoker.Cache(cache, locality=locality, stands_aside=False)
    with stoker.Loader(dataset, batch, cache=kept, recipe="minio", epochs=epochs) as loader:
        for epoch in range(epochs):
            distributed.barrier()
            began, before = time.monotonic(), sent()
            for inputs in loader:
                model(inputs.float() / 255).square().mean().backward()
                time.sleep(compute)  # an accelerator at work
            distributed.barrier()
            seconds = time.monotonic() - began
            stats = loader.epoch_stats[-1]
            lines.append(
                {
                    "epoch": epoch,
                    "seconds": seconds,
                    "compute": len(loader) * compute,
                    "sent": sent() - before,
                    "accesses": stats.accesses,
                    "hits": stats.hits,
                    "stored": stats.bytes_from_source,
                    "cached": cached(loader),
                }
            )
            distributed.barrier()
    (output / f"{rank}.json").write_text(json.dumps(lines))
    distributed.destroy_process_group()
    os._exit(0)  # the results are written


def cached(loader: Any) -> list[int]:
    """Return the samples that this node's cache keeps."""
    arena = loader.cache.store.tier.arena
    kept = [name for name in arena.stats()["regions"] if name != "window"]
    return [int(i) for name in kept for i in arena.list(name)]


if __name__ == "__main__":
    main()

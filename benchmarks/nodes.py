"""Training on several nodes, each of which caches a part of the data.

Nodes are network namespaces, joined by links of 1 Gbit in each direction (htb); the data set is a
folder behind 60 MB/s that all of them read (slow_fs.py). torchrun starts one rank per node, which
exchanges gradients through gloo. Each node may keep 20 % of the bytes. Compared are ranks that
prefer samples of their node, which alone keeps them, and ranks that divide each step as on one node
(``Cache(locality=False)``). Needs root, iproute2 and FUSE, and says so where they are missing.

``--exchange`` measures only what ranks exchange when an epoch begins.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from feed_servers import Unavailable as NoStorage
from feed_servers import slow_folder
from harness import Report, parser, show
from nodes_network import Node, Unavailable, nodes

MB_PER_S = 60
MEGABITS = 1000
CACHE = 0.2
COMPUTE_MS = 20.0
NUM_SCORES = 1_280_000
_HERE = Path(__file__).parent


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--nodes", type=int, nargs="*", default=[2, 4])
    arguments.add_argument("--samples", type=int, default=4000)
    arguments.add_argument("--size", type=int, default=110_000, help="bytes of a sample")
    arguments.add_argument("--epochs", type=int, default=5)
    arguments.add_argument("--batch", type=int, default=64, help="of a rank")
    arguments.add_argument("--exchange", action="store_true", help="only the exchange of scores")
    args = arguments.parse_args()
    if args.smoke:
        args.nodes, args.samples, args.epochs = [2], 200, 2
    if not args.exchange:
        _show_training(args)
    _show_exchange(args)


# --- training ---


def _show_training(args: Any) -> None:
    report = Report("Several nodes, each with 20 % of the data as cache", args.smoke)
    with tempfile.TemporaryDirectory(prefix="stoker-nodes-") as folder:
        data = Path(folder) / "data"
        data.mkdir()
        for number in range(args.samples):
            sample = np.random.default_rng(number).bytes(args.size)
            (data / f"{number:06}.bin").write_bytes(sample)
        try:
            for count in args.nodes:
                for locality in (True, False):
                    _measure(report, args, data, count, locality)
        except (Unavailable, NoStorage) as why:
            report.remarks.append(f"left out: {why}")
    show(args, report)


def _measure(report: Report, args: Any, data: Path, count: int, locality: bool) -> None:
    with slow_folder(data, 1, 1, MB_PER_S, 0) as far, nodes(count, MEGABITS) as machines:
        ranks = _train(args, far, machines, locality)
    later = range(1, args.epochs)
    hits = sum(rank[e]["hits"] for rank in ranks for e in later)
    ratio = hits / sum(rank[e]["accesses"] for rank in ranks for e in later)
    allowed = min(1.0, count * CACHE)
    copies = [sample for rank in ranks for sample in rank[-1]["cached"]]
    seconds, bounds = [], []
    for e in later:
        stored = sum(rank[e]["stored"] for rank in ranks) / (MB_PER_S * 1e6)
        exchanged = max(rank[e]["sent"] for rank in ranks) / (MEGABITS * 1e6 / 8)
        bounds.append({"source": stored, "link": exchanged, "compute": ranks[0][e]["compute"]})
        seconds.append(max(rank[e]["seconds"] for rank in ranks))
    ratios = [s / max(bound.values()) for s, bound in zip(seconds, bounds, strict=True)]
    report.row(
        nodes=count,
        locality=str(locality),
        hit_ratio=ratio,
        joint_capacity=allowed,
        cached_twice=len(copies) - len(set(copies)),
        epoch_s=statistics.median(seconds),
        source_s=statistics.median(bound["source"] for bound in bounds),
        link_s=statistics.median(bound["link"] for bound in bounds),
        compute_s=statistics.median(bound["compute"] for bound in bounds),
        to_bound=statistics.median(ratios),
    )
    if locality:
        name = f"{count} nodes"
        report.target(f"{name}: below joint capacity", 100 * (allowed - ratio), 2, "points")
        report.target(f"{name}: samples cached twice", len(copies) - len(set(copies)), 0)
        report.target(f"{name}: epoch to its bound", statistics.median(ratios), 1.2)


def _train(
    args: Any, data: Path, machines: list[Node], locality: bool
) -> list[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="stoker-nodes-out-") as output:
        running = [
            _start(args, data, Path(output), machines, number, locality)
            for number in range(len(machines))
        ]
        try:
            for process in running:
                said, _ = process.communicate(timeout=180)
                if process.returncode:
                    raise SystemExit(f"a node failed:\n{said[-3000:]}")
        finally:
            for process in running:
                process.kill()
        files = [Path(output) / f"{rank}.json" for rank in range(len(machines))]
        return [json.loads(file.read_text()) for file in files]


def _start(
    args: Any, data: Path, output: Path, machines: list[Node], number: int, locality: bool
) -> subprocess.Popen[str]:
    node = machines[number]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(machines)}"]
    launch += [f"--node-rank={number}", "--nproc-per-node=1"]
    launch += [f"--master-addr={machines[0].address}", "--master-port=29511"]
    job = [str(_HERE / "nodes_job.py"), str(data), str(output), str(args.epochs), str(args.batch)]
    job += [f"{CACHE:.0%}", str(int(locality)), str(COMPUTE_MS)]
    environment = {
        **os.environ,
        "STOKER_NODE": f"n{number}",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        node.command(*launch, *job),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# --- the exchange of scores ---


def _show_exchange(args: Any) -> None:
    count = 10_000 if args.smoke else NUM_SCORES
    report = Report("Exchange of scores between 4 ranks", args.smoke)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="stoker-meet-") as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=_exchange, args=(rank, f"file://{folder}/m", count, results))
            for rank in range(4)
        ]
        for rank in ranks:
            rank.start()
        slowest = np.max([results.get(timeout=120) for _ in ranks], axis=0)
        for rank in ranks:
            rank.join()
    report.row(scores=count, ranks=4, median_s=float(np.median(slowest)), worst_s=slowest.max())
    report.target(f"exchange of {count:,} scores", float(np.median(slowest)), 1, "s")
    show(args, report, part="exchange")


def _exchange(rank: int, meeting: str, count: int, results: Any) -> None:
    import torch
    from torch import distributed

    from stoker.epoch.ranks import exchange
    from stoker.pytorch.ranks import Group
    from stoker.scores import Scores

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=4)
    scores, agreed, took = Scores(count), Scores(count).snapshot(), []
    own = np.random.default_rng(0).permutation(count)[rank::4]  # each visited a quarter
    for step in range(7):
        scores.update(own, np.full(len(own), float(step + rank)), step)
        distributed.barrier()
        began = time.perf_counter()
        exchange(scores, agreed, Group())
        took.append(time.perf_counter() - began)
        agreed = scores.snapshot()
    results.put(took[2:])
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

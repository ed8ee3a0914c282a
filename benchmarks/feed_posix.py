"""Feeding from a slow file system: against torch's DataLoader, the limit formula, bare threads."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from feed_loaders import Files, Run, bare_threads, from_memory, through_stoker, through_torch
from feed_process import run_alone
from feed_servers import slow_folder
from harness import Report, interleave, paired_ratio

from stoker.cli.demo import write_digits
from stoker.source.image_folder import ImageFolderSource

IOPS = 4_000  # opens and reads; two of them make a file
MB_PER_S = 100


def posix(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Files behind 10 + 10 ms, and behind 2 + 2 ms."""
    with contextlib.ExitStack() as stack:
        root = args.data or stack.enter_context(digits(smoke=args.smoke))
        with slow_folder(root, 10, 10, MB_PER_S, IOPS) as far:
            against_torch(report, args, choose(far, 200 if args.smoke else 4_000))
        with slow_folder(root, 2, 2, MB_PER_S, 0) as far:
            against_threads(report, args, choose(far, 200 if args.smoke else 10_000))


def stall(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Files behind 10 + 10 ms, and training that is slower than these."""
    with contextlib.ExitStack() as stack:
        root = args.data or stack.enter_context(digits(smoke=args.smoke))
        far = stack.enter_context(slow_folder(root, 10, 10, MB_PER_S, IOPS))
        without_need_to_stall(report, args, root, far)


@contextlib.contextmanager
def digits(*, smoke: bool = False):
    """A folder of class folders of real images."""
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        yield write_digits(Path(own), copies=1 if smoke else 6)


def choose(root: Path, most: int) -> Files:
    """Return files of all classes."""
    listing = ImageFolderSource(root)
    step = max(1, len(listing) // most)
    return Files(tuple(listing.name(i) for i in range(0, len(listing), step)[:most]))


def against_torch(report: Report, args: argparse.Namespace, place: Files) -> None:
    """Epoch one, with an accelerator that is never the limit."""
    run = Run(1, 64, 4, 0, {"cache": "20%"})
    results = interleave(
        {
            "torch DataLoader": lambda: run_alone(through_torch, place, run)["epoch_s"][0],
            "Stoker": lambda: run_alone(through_stoker, place, run)["epoch_s"][0],
        },
        1 if args.smoke else min(args.rounds, 3),
        warm_up=not args.smoke,
    )
    for name, seconds in results.items():
        speed = len(place.paths) / float(np.median(seconds))
        report.row(case="10 + 10 ms, epoch one", loader=name, samples_per_s=speed)
    ratio = paired_ratio(results["torch DataLoader"], results["Stoker"])
    report.target("epoch one, speed to torch's DataLoader", ratio, 4, at_least=True)


def without_need_to_stall(report: Report, args: argparse.Namespace, root: Path, far: Path) -> None:
    """Computing slower than the storage can give the misses, so nothing need wait.

    What torch takes to hand batches over stands beside it: its loader, with all samples in memory.
    """
    x_storage = IOPS / 2
    cases = ((0.2, 800, 20_000), (0.2, 1_500, 50_000), (0.6, 3_000, 50_000))
    for share, x_compute, count in cases[-1:] if args.smoke else cases:
        place = choose(far, 200 if args.smoke else count)
        needed = x_storage / x_compute  # the miss ratio without a stall, m* of the algorithms
        run = Run(3, 64, 4, x_compute, {"cache": f"{share:.0%}"})
        result = run_alone(through_stoker, place, run)
        stalls = _shares(result)
        stall = float(np.median(stalls[1:]))
        report.row(
            case=f"10 + 10 ms, {x_compute} samples/s computed, cache {share:.0%}",
            loader="Stoker",
            samples_per_s=len(place.paths) / float(np.median(result["epoch_s"][1:])),
            miss_ratio=1 - result["hits"][-1],
            enough=needed,
            stall_first=stalls[0],
            stall_later=stall,
            cpu_s_an_epoch=result["cpu_s"] / run.epochs,
        )
        case = f"stall share, {x_compute} samples/s, cache {share:.0%}"
        report.target(case, stall, 0.05)
        if needed >= 1:
            report.target(f"{case}, epoch one", stalls[0], 0.05)
    result = run_alone(from_memory, choose(root, 200 if args.smoke else count), run)
    report.row(
        case=f"in memory, {x_compute} samples/s computed",
        loader="torch DataLoader",
        samples_per_s=len(place.paths) / float(np.median(result["epoch_s"][1:])),
        stall_first=_shares(result)[0],
        stall_later=float(np.median(_shares(result)[1:])),
        cpu_s_an_epoch=result["cpu_s"] / run.epochs,
    )


def _shares(result: dict[str, Any]) -> list[float]:
    """Return the share of each epoch that was spent waiting for batches."""
    return [wait / epoch for wait, epoch in zip(result["wait_s"], result["epoch_s"], strict=True)]


def against_threads(report: Report, args: argparse.Namespace, place: Files) -> None:
    """Epoch one without computing, where the stand-in itself is the limit."""
    run = Run(1, 64, 2, 0, {"cache": "20%"})
    results = interleave(
        {
            "32 bare threads": lambda: run_alone(bare_threads, place, 32)["epoch_s"][0],
            "Stoker": lambda: run_alone(through_stoker, place, run)["epoch_s"][0],
        },
        1 if args.smoke else min(args.rounds, 5),
        warm_up=not args.smoke,
    )
    for name, seconds in results.items():
        speed = len(place.paths) / float(np.median(seconds))
        report.row(case="2 + 2 ms, epoch one", loader=name, samples_per_s=speed)
    ratio = paired_ratio(results["32 bare threads"], results["Stoker"])
    report.target("2 + 2 ms, speed to 32 bare threads", ratio, 0.8, at_least=True)

"""Feeding from object storage: large objects against the line, small ones against a client."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from feed_loaders import Objects, Run, bare_client, through_stoker, through_torch
from feed_process import run_alone
from feed_servers import Bucket, s3
from harness import Report, interleave, paired_ratio

from stoker import Cache

SHARE = 0.2
DELAY_MS, MB_PER_S = 7.0, 60.0
LARGE, SMALL = 110_000, 3_000


def large(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Objects of 110 KB: what the line can carry decides."""
    count = 300 if args.smoke else 6_000
    with s3(DELAY_MS, MB_PER_S) as bucket:
        bucket.fill("large", count, LARGE)
        place = Objects(bucket, "large")
        seconds = count * LARGE / MB_PER_S / 1e6
        run = Run(3, 64, 4, 2_000, {"cache": f"{SHARE:.0%}", "recipe": "minio"})
        rounds = 1 if args.smoke else min(args.rounds, 3)
        results = [run_alone(through_stoker, place, run) for _ in range(rounds)]
        first, later = median_epochs(results)
        add_epochs(report, "Stoker, cache 20 %", results, seconds)
        report.target("first epoch to bytes / bandwidth", first / seconds, 1.05)
        report.target("later ones to (1 - c) of it", later / seconds / (1 - SHARE), 1.08)
        on_disk = Cache(f"{SHARE:.0%}", disk=folder / "disk")
        run = Run(4, 64, 4, 2_000, {"cache": on_disk, "recipe": "minio"})
        result = run_alone(through_stoker, place, run)
        add_epochs(report, "Stoker, all on disk", [result], seconds)
        in_memory = run_alone(through_stoker, place, Run(4, 64, 4, 2_000, {"cache": "100%"}))
        add_epochs(report, "Stoker, all in memory", [in_memory], seconds)
        report.target(
            "later epochs from disk to those from memory",
            median_epochs([result])[1] / median_epochs([in_memory])[1],
            1.05,
        )
        one = run_alone(through_torch, place, Run(1, 64, 4, 2_000))
        add_epochs(report, "torch DataLoader, obstore, 4 workers", [one], seconds)
    report.remarks.append(f"The line needs {seconds:.3g} s for all objects, without headers.")


def median_epochs(results: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the median seconds of the first epoch, and of all later ones."""
    later = [seconds for result in results for seconds in result["epoch_s"][1:]]
    first = float(np.median([result["epoch_s"][0] for result in results]))
    return first, float(np.median(later)) if later else first


def add_epochs(
    report: Report, name: str, results: list[dict[str, Any]], line_seconds: float
) -> None:
    """Add a row for the first epochs of a contestant, and one for the later ones."""
    count = results[0]["count"] / len(results[0]["epoch_s"])
    cpu = float(np.median([r["cpu_s"] / len(r["epoch_s"]) for r in results]))
    for label, seconds in zip(("first", "later"), median_epochs(results), strict=True):
        chosen = slice(0, 1) if label == "first" else slice(1, None)
        passed = [n for r in results for n in r["passed"][chosen]]
        if not passed:
            continue
        report.row(
            loader=name,
            epoch=label,
            seconds=seconds,
            samples_per_s=count / seconds,
            to_line=seconds / line_seconds,
            MB_passed=float(np.median(passed)) / 1e6,
            cpu_s_an_epoch=cpu,
            start_s=float(np.median([r["start_s"] for r in results])) if label == "first" else None,
        )


def small(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Objects of 3 KB: requests decide, and the server's own limit is found by a bare client."""
    count = 300 if args.smoke else 10_000
    with s3(DELAY_MS, MB_PER_S) as bucket:
        bucket.fill("small", count, SMALL)
        place = Objects(bucket, "small")
        cpu: dict[str, list[float]] = {}

        def rate(name: str, result: dict[str, Any]) -> float:
            cpu.setdefault(name, []).append(result["cpu_s"])
            return float(result["epoch_s"][0]) / count

        run = Run(1, 64, 2, 0, {"cache": f"{SHARE:.0%}", "recipe": "minio"})
        names = "bare client, 64 ways", "Stoker"
        results = interleave(
            {
                names[0]: lambda: rate(names[0], run_alone(bare_client, place, 64)),
                names[1]: lambda: rate(names[1], run_alone(through_stoker, place, run)),
            },
            1 if args.smoke else min(args.rounds, 5),
            warm_up=not args.smoke,
        )
    for name, each in results.items():
        speed = 1 / float(np.median(each))
        report.row(loader=name, objects_per_s=speed, cpu_s=float(np.median(cpu[name])))
    ratio = paired_ratio(results[names[0]], results[names[1]])
    report.target("small objects, speed to a bare client", ratio, 0.9, at_least=True)


def far_bucket() -> Any:
    """The server of these parts, for others that read from it."""
    return s3(DELAY_MS, MB_PER_S)


__all__ = ["Bucket", "add_epochs", "far_bucket", "large", "small"]

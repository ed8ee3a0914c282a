"""Feeding where the storage is no hindrance: what the cache costs, reads once, hits by plan."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feed_loaders import Files, InMemory, Run, train
from feed_posix import choose, digits
from feed_process import Running, run_alone
from harness import Report, interleave, paired_ratio
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.images import decode_image
from stoker.source.held import MemorySource
from stoker.testing.sources import SlowSource

NUM = 4_000  # samples of part flight


def compute(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Files in the page cache and a slower model, against the same bytes in memory.

    A model that computes on a processor is in stands_down.py.
    """
    with contextlib.ExitStack() as stack:
        root = args.data or stack.enter_context(digits(smoke=args.smoke))
        place = choose(root, 300 if args.smoke else 10_000)
        photos = _photos(folder, 40 if args.smoke else 4_000)
        rounds = 1 if args.smoke else min(args.rounds, 5)
        cases = (
            ("110 KB, asleep, 400 samples/s", photos, 32, 400.0),
            ("2 KB, asleep, 2,000 samples/s", place, 128, 2_000.0),
        )
        for case, files, batch_size, rate in cases:
            for path in files.paths:
                Path(path).read_bytes()
            run = Run(1 if args.smoke else 3, batch_size, 2, rate, {"cache": "20%"})
            _one_case(report, case, files, run, rounds)


def _photos(folder: Path, count: int) -> Files:
    """Write images of the size of ImageNet's; a tenth of them differ."""
    rng = np.random.default_rng(0)
    (folder / "photos").mkdir()
    paths = [folder / "photos" / f"{i}.jpg" for i in range(count)]
    for i, path in enumerate(paths):
        if i < max(1, count // 10):
            coarse = rng.integers(0, 256, (94, 125, 3), np.uint8)
            image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BILINEAR)
            image.save(path, quality=94)
        else:
            path.write_bytes(paths[i % (count // 10)].read_bytes())
    return Files(tuple(map(str, paths)))


def _one_case(report: Report, case: str, place: Files, run: Run, rounds: int) -> None:
    figures: dict[str, list[dict[str, Any]]] = {"memory": [], "Stoker": []}

    def total(name: str, work: Callable[..., dict[str, Any]]) -> float:
        figures[name].append(run_alone(work, place, run))
        return float(sum(figures[name][-1]["epoch_s"]))

    seconds = interleave(
        {
            "memory": lambda: total("memory", learn_from_memory),
            "Stoker": lambda: total("Stoker", learn_through_stoker),
        },
        rounds,
        warm_up=False,
    )
    cpu = {name: [each["cpu_s"] for each in found] for name, found in figures.items()}
    for name in seconds:
        report.row(
            case=case,
            data_from=name,
            total_s=float(np.median(seconds[name])),
            cpu_s=float(np.median(cpu[name])),
        )
    report.target(f"{case}: time", paired_ratio(seconds["Stoker"], seconds["memory"]), 1.02)
    report.target(f"{case}: CPU seconds", paired_ratio(cpu["Stoker"], cpu["memory"]), 1.10)


def learn_through_stoker(place: Files, run: Run) -> dict[str, Any]:
    """Train on images through Stoker's Loader."""
    dataset = stoker.SampleDataset(place.open(), decode=decode_image)
    with stoker.Loader(
        dataset,
        run.batch_size,
        num_workers=run.workers,
        collate_fn=images_of,
        persistent_workers=True,
        epochs=run.epochs,
        **run.options,
    ) as loader:
        return train(run, lambda epoch: loader)


def learn_from_memory(place: Files, run: Run) -> dict[str, Any]:
    """Train on images whose bytes lie in memory, through torch's DataLoader."""
    samples = InMemory(place.open().read(range(len(place.paths))), decode_image)
    loader = through_torch(samples, run)
    return train(run, lambda epoch: loader)


def through_torch(dataset: Dataset[Any], run: Run) -> DataLoader[Any]:
    """Return torch's DataLoader of images."""
    return DataLoader(
        dataset,
        run.batch_size,
        shuffle=True,
        num_workers=run.workers,
        collate_fn=images_of,
        persistent_workers=True,
    )


def images_of(images: list[np.ndarray]) -> tuple[torch.Tensor, int]:
    """Collate: u8[n, height, width, 3] and n."""
    return torch.from_numpy(np.stack(images)), len(images)


def flight(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Reads of the storage when ranks, workers, jobs and the prefetcher share one cache."""
    cases = (
        ("2 ranks of 4 workers", 1.5, 1, 2),
        ("2 ranks of 4 workers", 0.3, 1, 2),
        ("2 jobs of 4 workers", 1.5, 2, 1),
        ("2 jobs of 4 workers", 0.3, 2, 1),
    )
    for case, share, jobs, ranks in cases[1:3] if args.smoke else cases:
        count = 400 if args.smoke else NUM
        cache = int(share * count * 2_000)
        rng = np.random.default_rng((jobs, ranks, cache))
        samples = [rng.bytes(2_000) for _ in range(count)]
        source = SlowSource(MemorySource(samples), latency=0.005)
        # No process may finish before the others have begun.
        together = multiprocessing.get_context("spawn").Barrier(jobs * ranks, timeout=300)
        running = [
            Running(walk, (source, rank, ranks, job, cache, together))
            for job in range(jobs)
            for rank in range(ranks)
        ]
        results = [each.result() for each in running]
        reads = int(source.reads.sum())
        misses = sum(result["fetched"] for result in results)
        report.row(
            case=case,
            cache=share,
            accesses=sum(result["accesses"] for result in results),
            misses=misses,
            reads=reads,
            most_reads_of_one=int(source.reads.max()),
        )
        report.target(f"{case}, cache {share:.0%}: reads - misses", abs(reads - misses), 0)
        if share > 1:
            report.target(f"{case}, cache {share:.0%}: reads - samples", abs(reads - count), 0)


def walk(
    source: SlowSource, rank: int, ranks: int, job: int, cache: int, together: Any
) -> dict[str, Any]:
    """Go through three epochs as one rank of a job."""
    with stoker.Loader(
        stoker.SampleDataset(source),
        64,
        num_workers=4,
        collate_fn=len,
        rank=rank,
        world_size=ranks,
        seed=job,
        cache=cache,
        epochs=3,
        persistent_workers=True,
    ) as loader:
        together.wait()
        for _ in range(3):
            for _ in loader:
                pass
        together.wait()
        return {"fetched": loader.stats.fetched, "accesses": loader.stats.accesses}


def belady(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Hits of next use through the Loader, uniform epochs, from the second one on."""
    share = 0.2
    with contextlib.ExitStack() as stack:
        root = args.data or stack.enter_context(digits(smoke=args.smoke))
        place = choose(root, 300 if args.smoke else 10_000)
        for prefetch in ("256MiB",) if args.smoke else (0, "256MiB"):
            for request_bytes in (0.0, 1e6):
                row = run_alone(hits_by_plan, place, share, request_bytes, prefetch)
                found = {name: row[name] for name in ("byte_hits", "hits")}
                report.row(prefetch=prefetch, request_bytes=request_bytes, cache=share, **found)
                name = f"request_bytes={request_bytes:g}, prefetch {prefetch}"
                if request_bytes:
                    report.target(f"{name}: hits in number", row["hits"], share, at_least=True)
                else:
                    distance = abs(row["byte_hits"] - share)
                    report.target(f"{name}: byte hits, distance to c", distance, 0.01)


def hits_by_plan(
    place: Files, share: float, request_bytes: float, prefetch: int | str
) -> dict[str, Any]:
    """Return hits of the epochs after the second."""
    with stoker.Loader(
        stoker.SampleDataset(place.open()),
        64,
        num_workers=2,
        collate_fn=len,
        cache=stoker.Cache(f"{share:.0%}", prefetch=prefetch, stands_aside=False),
        recipe=stoker.recipes.belady(request_bytes=request_bytes),
        persistent_workers=True,
        epochs=5,
    ) as loader:
        for _ in range(5):
            for _ in loader:
                pass
        later = loader.epoch_stats[2:]
    return {
        "hits": float(np.mean([each.hit_ratio for each in later])),
        "byte_hits": float(np.mean([each.byte_hit_ratio for each in later])),
    }

"""LRU and MinIO through the real loader on real files, beside what theory says.

Uniform epochs over at least 10,000 files at caches of 20, 40, 60 and 80 % of the bytes. From the
second epoch on LRU's byte hit ratio is c + (1 - c) ln(1 - c), and that of MinIO is c, which no
policy exceeds when each sample is visited once an epoch. Without --data, 10,782 real handwritten
digits (with shifts) are written first.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

from harness import Report, parser, show

import stoker
from stoker.cli.demo import write_digits
from stoker.source.files import FileSource
from stoker.source.image_folder import ImageFolderSource

SHARES = (0.2, 0.4, 0.6, 0.8)
RECIPES = ("lru", "minio")
LIMIT = 0.01


def main() -> None:
    """Parse the arguments, measure every case, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=Path, help="folder of class folders")
    arguments.add_argument("--samples", type=int, default=20_000, help="files used, at most")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument(
        "--prefetch-bytes",
        default="0",
        help="as Loader takes it; what is read ahead cannot be evicted before its use, which adds "
        "hits that the closed form of the cache alone does not know",
    )
    args = arguments.parse_args()
    report = Report("Byte hit ratio through the real loader, from the second epoch on", args.smoke)
    with contextlib.ExitStack() as stack:
        folder = args.data
        if folder is None:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-bench-"))
            folder = write_digits(Path(own), copies=1 if args.smoke else 6)
        listing = ImageFolderSource(folder)
        # Every class comes in turn in a strided choice; the first ones would be one class only.
        step = max(1, len(listing) // args.samples)
        paths = [listing.name(i) for i in range(0, len(listing), step)][: args.samples]
        epochs = 2 if args.smoke else args.epochs
        for name in RECIPES:
            for share in SHARES:
                row = measure(paths, name, share, epochs, args)
                report.row(**row)
                report.target(f"{name} at {share:.0%}, distance", row["distance"], LIMIT)
    show(args, report, part="" if args.prefetch_bytes == "0" else "prefetch")


def measure(
    paths: list[str], name: str, share: float, epochs: int, args: argparse.Namespace
) -> dict[str, str | int | float]:
    """Return one row: hits, byte hits and the closed form for one recipe and cache size."""
    recipe = stoker.recipes.get(name)
    dataset = stoker.SampleDataset(FileSource(paths))
    with stoker.Loader(
        dataset,
        batch_size=64,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        collate_fn=len,
        cache=stoker.Cache(f"{100 * share:g}%", prefetch=args.prefetch_bytes, stands_aside=False),
        recipe=recipe,
    ) as loader:
        for epoch in range(epochs):
            for _ in loader:
                pass
            if epoch == 0:
                first = loader.stats
        later = loader.stats.since(first)
    predicted = recipe.predicted_hit_ratio(share)
    assert predicted is not None
    distance = abs(later.byte_hit_ratio - predicted)
    return {
        "recipe": name,
        "cache": f"{share:.0%}",
        "files": len(paths),
        "hits": later.hit_ratio,
        "byte_hits": later.byte_hit_ratio,
        "closed_form": predicted,
        "distance": distance,
    }


if __name__ == "__main__":
    main()

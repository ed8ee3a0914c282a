"""Everything cached: Stoker's Loader against torch's DataLoader from the page cache.

Same image files, decoder, transform, batch size and count of workers; epochs without training,
interleaved. Without --data, 10,782 real handwritten digits (with shifts) are written first.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np
from harness import Report, interleave, paired_ratio, parser, show

from stoker.cli._loaders import epoch_timers
from stoker.cli.demo import write_digits


def main() -> None:
    """Parse the arguments, run both loaders, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=Path, help="folder of class folders, images of one size")
    arguments.add_argument("--workers", type=int, nargs="+", default=[2, 0])
    arguments.add_argument("--batch-size", type=int, default=256)
    args = arguments.parse_args()
    rounds = 1 if args.smoke else min(args.rounds, 5)
    report = Report("Everything cached, loaders without training", args.smoke)
    with contextlib.ExitStack() as stack:
        folder = args.data
        if folder is None:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-bench-"))
            folder = write_digits(Path(own), copies=1 if args.smoke else 6)
        for workers in args.workers:
            with epoch_timers(folder, workers, args.batch_size) as timers:
                results = interleave(timers, rounds)
            plain = results["torch DataLoader"]
            for name, figures in results.items():
                report.row(
                    workers=workers,
                    loader=name,
                    us_per_sample=1e6 * float(np.median(figures)),
                    speed_to_torch=paired_ratio(plain, figures),
                )
            ratio = paired_ratio(plain, results["stoker.Loader"])
            report.target(f"speed with {workers} workers to torch", ratio, 1, at_least=True)
    show(args, report)


if __name__ == "__main__":
    main()

"""Storage faster than the model: what foresight costs then, and whether it says that it stood down.

A small CNN trains on one processor on JPEG files in the page cache, decoded by two workers: through
torch's DataLoader, through the Loader as it is by default, and with ``adaptive=True``, which may
repeat samples where storage does not keep up and shall not here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feed_loaders import Files, Run
from feed_local import learn_through_stoker, learn_through_torch
from feed_posix import choose, digits
from feed_process import run_alone
from harness import Report, interleave, paired_ratio, parser
from torch.utils.data import Dataset

import stoker
from stoker.pytorch.decode import decode_image

PLAIN, DEFAULT, ADAPTIVE = "torch's DataLoader", "foresight", "foresight, adaptive"


class OfFiles(Dataset[Any]):
    """Images, each read from its file and decoded when it is asked for."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        return decode_image(Path(self._paths[index]).read_bytes())


def plainly(place: Files, run: Run) -> dict[str, Any]:
    """Train as one does without Stoker."""
    return learn_through_torch(OfFiles(place.paths), run)


def through_stoker(place: Files, run: Run) -> dict[str, Any]:
    """Train through the Loader, and keep what it logs of its epochs."""
    said = _Said()
    logger = logging.getLogger("stoker")
    logger.setLevel(logging.INFO)
    logger.addHandler(said)
    found = learn_through_stoker(place, run, _observed)
    return found | {"said": said.decisions}


def _observed(loader: stoker.Loader) -> Iterator[Any]:
    """Yield the batches of an epoch, and tell made-up losses after each."""
    for batch, length in loader:
        yield batch, length
        loader.observe(torch.ones(length))


class _Said(logging.Handler):
    """Keeps the lines that say how an epoch is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if "storage supplied" in line:
            self.decisions.append(line)


def main() -> None:
    """Parse the arguments, train in turns, print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=Path, help="folder of class folders of images")
    arguments.set_defaults(rounds=5)
    args = arguments.parse_args()
    with contextlib.ExitStack() as stack:
        root = args.data or stack.enter_context(digits(smoke=args.smoke))
        place = choose(root, 300 if args.smoke else 5_000)
        for path in place.paths:
            Path(path).read_bytes()
        _report(place, 1 if args.smoke else args.rounds, args.smoke).show(args.json)


def _report(place: Files, rounds: int, smoke: bool) -> Report:
    found: dict[str, list[dict[str, Any]]] = {PLAIN: [], DEFAULT: [], ADAPTIVE: []}
    epochs = 4 if smoke else 6

    def total(name: str) -> float:
        options = {} if name == DEFAULT else {"recipe": "foresight:adaptive=true"}
        run = Run(epochs, 128, 2, options=options | {"cache": "20%"})
        work = plainly if name == PLAIN else through_stoker
        found[name].append(run_alone(work, place, run))
        return float(sum(found[name][-1]["epoch_s"]))

    seconds = interleave(
        {name: (lambda name=name: total(name)) for name in found}, rounds, warm_up=False
    )
    report = Report("Storage faster than the model", smoke)
    for name, times in seconds.items():
        report.row(
            training=name,
            s=float(np.median(times)),
            to_plain=paired_ratio(times, seconds[PLAIN]),
            cpu_s=float(np.median([one["cpu_s"] for one in found[name]])),
        )
        if name != PLAIN:
            report.target(f"{name}, time", paired_ratio(times, seconds[PLAIN]), 1.02)
    decisions = [line for one in found[ADAPTIVE] for line in one["said"]]
    stood = [line for line in decisions if "each sample once an epoch" in line]
    report.target("epochs in which adaptive did not stand down", len(decisions) - len(stood), 0)
    report.remarks = [f"It said, among others: `{stood[-1]}`"] if stood else []
    return report


if __name__ == "__main__":
    main()

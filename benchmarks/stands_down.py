"""Storage faster than the model: what the Loader costs then, and whether it says it stood down.

A small CNN trains on one processor on JPEG files in the page cache, decoded by two workers: through
torch's DataLoader, from these files and from memory, through the Loader as it is by default, and
with ``adaptive=True``, which may repeat samples where storage does not keep up and shall not here.
All train the same model in one process, an epoch each in turn, since two processes that do the same
differ in speed by up to a fifth. Even so the model's own steps differ by some percent from epoch to
epoch, so that the time beside them is told apart: what is waited for, unpacked, counted and scored.
The first epoch has the start of workers, prefetch and cache.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feed_loaders import Files, InMemory, Run
from feed_local import images_of, through_torch
from feed_posix import choose, digits
from feed_process import run_alone
from harness import Report, parser, show
from numpy.typing import NDArray
from torch.utils.data import Dataset

import stoker
from stoker.images import decode_image

PLAIN, MEMORY = "torch's DataLoader", "torch's DataLoader, from memory"
DEFAULT, ADAPTIVE = "foresight", "foresight, adaptive"


class OfFiles(Dataset[Any]):
    """Images, each read from its file and decoded when it is asked for."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        return decode_image(Path(self._paths[index]).read_bytes())


def in_turns(place: Files, epochs: int, number: int) -> dict[str, Any]:
    """Train with all contestants; return the seconds of their epochs, and what was logged.

    ``beside`` are those that the model's steps did not take. The ``number`` of the round says who
    begins.
    """
    said = _Said()
    logger = logging.getLogger("stoker")
    logger.setLevel(logging.INFO)
    logger.addHandler(said)
    run = Run(epochs, 128, 2)
    step = _small_cnn()
    reordered = Files(place.paths[::-1])  # or both would be jobs that share one cache
    samples = InMemory(place.open().read(range(len(place.paths))), decode_image)
    for _ in range(8):  # or the first one would pay for it
        step(images_of([decode_image(Path(path).read_bytes()) for path in place.paths[:128]])[0])
    with contextlib.ExitStack() as stack:

        def through_stoker(recipe: str, place: Files) -> Iterable[Any]:
            loader = stack.enter_context(
                stoker.Loader(
                    stoker.SampleDataset(place.open(), decode=decode_image),
                    run.batch_size,
                    num_workers=run.workers,
                    collate_fn=images_of,
                    persistent_workers=True,
                    epochs=epochs,
                    cache="20%",
                    recipe=recipe,
                )
            )
            return _Observed(loader)

        opened: dict[str, Callable[[], Iterable[Any]]] = {
            PLAIN: lambda: through_torch(OfFiles(place.paths), run),
            MEMORY: lambda: through_torch(samples, run),
            DEFAULT: lambda: through_stoker("foresight", place),
            ADAPTIVE: lambda: through_stoker("foresight:adaptive=true", reordered),
        }
        loaders: dict[str, Iterable[Any]] = {}
        seconds: dict[str, list[float]] = {name: [] for name in opened}
        beside: dict[str, list[float]] = {name: [] for name in opened}
        names = list(opened)
        for epoch in range(epochs):
            first = (number + epoch) % len(names)
            for name in names[first:] + names[:first]:
                begin, steps = time.monotonic(), 0.0
                if name not in loaders:
                    loaders[name] = opened[name]()
                for batch, _ in loaders[name]:
                    before = time.monotonic()
                    step(batch)
                    steps += time.monotonic() - before
                seconds[name].append(time.monotonic() - begin)
                beside[name].append(seconds[name][-1] - steps)
        return {"seconds": seconds, "beside": beside, "said": said.decisions}


def _small_cnn() -> Callable[[torch.Tensor], None]:
    """Return the training step of a small CNN on one processor."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that spin for one another would multiply what others use
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.ReLU()]
        layers += [torch.nn.MaxPool2d(2)]
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    model.append(torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        out = model(batch.permute(0, 3, 1, 2).float() / 255)
        out.logsumexp(1).mean().backward()  # the values do not matter, the work does
        optimizer.step()

    return step


class _Observed:
    """Batches of a Loader, which is told made-up losses after each."""

    def __init__(self, loader: stoker.Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch, length in self._loader:
            yield batch, length
            self._loader.observe(torch.ones(length))


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
        show(args, _report(place, 1 if args.smoke else args.rounds, args.smoke))


def _report(place: Files, rounds: int, smoke: bool) -> Report:
    epochs = 4 if smoke else 6
    found = [run_alone(in_turns, place, epochs, number) for number in range(rounds)]
    seconds, beside = (
        {name: np.array([one[what][name] for one in found]) for name in found[0][what]}
        for what in ("seconds", "beside")
    )
    report = Report("Storage faster than the model", smoke)
    for name, times in seconds.items():
        ratios, to_memory = times / seconds[PLAIN], float(np.median(times / seconds[MEMORY]))
        low, high = _interval(ratios)
        more = float(np.median((beside[name] - beside[PLAIN]) / seconds[PLAIN]))
        report.row(
            training=name,
            epoch_s=float(np.median(times)),
            to_plain=float(np.median(ratios)),
            low=low,
            high=high,
            first_epoch=float(np.median(ratios[:, 0])),
            whole_run=float(np.median(times.sum(axis=1) / seconds[PLAIN].sum(axis=1))),
            to_memory=to_memory,
            beside_steps=float(np.median(beside[name] / times)),
            more_beside=more,
        )
        if name in (DEFAULT, ADAPTIVE):
            report.target(f"{name}, time to that of torch", float(np.median(ratios)), 1.02)
            report.target(f"{name}, time to that from memory", to_memory, 1.02)
            report.target(f"{name}, more beside the steps than torch", more, 0.02)
    decisions = [line for one in found for line in one["said"]]
    stood = [line for line in decisions if "each sample once an epoch" in line]
    report.target("epochs in which adaptive did not stand down", len(decisions) - len(stood), 0)
    report.remarks = [f"It said, among others: `{stood[-1]}`"] if stood else []
    return report


def _interval(ratios: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval, over rounds, of the median of the epochs' ``ratios``."""
    rounds = np.random.default_rng(0).integers(0, len(ratios), (10_000, len(ratios)))
    low, high = np.quantile(np.median(ratios[rounds], axis=(1, 2)), (0.025, 0.975))
    return float(low), float(high)


if __name__ == "__main__":
    main()

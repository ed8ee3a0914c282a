"""A cache of resized photographs: hits, epochs behind a narrow storage, and decoding.

Photographs of 110 KB each (benchmarks/images.py makes them) on storage of 60 MB/s, 2 ms away, a
cache of 20 % of their bytes, and two workers that cut 224 x 224 pixels; no model. Once the cache
keeps originals, once ``resized:288``. Later epochs are held against (1 - hits) of what reading all
takes. Then processor time from bytes to pixels, by Pillow from originals and from either form; and
how much the pixels of ``Eval(256, 224)`` differ from those of originals, of 255.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, interleave, paired_ratio, parser, show
from images import SIZE, contestants, photographs, stored

import stoker
from stoker.epoch.cached import TOGETHER
from stoker.images import Eval, Train
from stoker.images.resize import Resized
from stoker.source import FileSource
from stoker.testing import SlowSource

STAGES = ("encoded", "resized:288")
FORMS = (
    "resized:224",
    "resized:256",
    "resized:288:80",
    "resized:288",
    "resized:288:95",
    "resized:320",
)
BANDWIDTH, LATENCY, SHARE = 60e6, 0.002, "20%"
EPOCHS, BATCH, WORKERS = 4, 64, 2


def main() -> None:
    """Parse the arguments, measure, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=4000)
    args = arguments.parse_args()
    rounds, samples = (1, 60) if args.smoke else (args.rounds, args.samples)
    stages = Report("A cache of photographs at training resolution", args.smoke)
    times = Report("From bytes to a part of 224 x 224", args.smoke)
    forms = Report("What Eval(256, 224) makes of them, to originals", args.smoke)
    files = [stored(photograph) for photograph in photographs()]
    with tempfile.TemporaryDirectory(prefix="stoker-stage-") as folder:
        paths = write(Path(folder), files, samples)
        epochs(stages, paths, rounds)
    decoding(times, files, 1 if args.smoke else 5, rounds)
    pixels(forms, files)
    show(args, stages, times, forms)


def write(folder: Path, files: list[bytes], samples: int) -> list[Path]:
    """Write so many files, the same photographs again and again."""
    paths = [folder / f"{number:06d}.jpg" for number in range(samples)]
    for path, data in zip(paths, islice(cycle(files), samples), strict=True):
        path.write_bytes(data)
    return paths


def epochs(report: Report, paths: list[Path], rounds: int) -> None:
    """Compare the stages by hits and by the time of epochs."""
    found: dict[str, list[dict[str, float]]] = {stage: [] for stage in STAGES}

    def note(stage: str) -> float:
        found[stage].append(train(paths, stage))
        return found[stage][-1]["later_s"]

    times = interleave({stage: partial(note, stage) for stage in STAGES}, rounds, warm_up=False)
    for stage, results in found.items():
        middle = {name: statistics.median(each[name] for each in results) for name in results[0]}
        report.row(
            stage=stage,
            hits=middle["hits"],
            first_epoch_s=middle["first_s"],
            later_epoch_s=middle["later_s"],
            reading_misses_s=middle["misses_s"],
            later_to_misses=to_misses(results),
            MB_from_storage=middle["later_bytes"] / 1e6,
            later_to_encoded=paired_ratio(times[stage], times["encoded"]),
        )
    resized = found["resized:288"]
    hits = statistics.median(each["hits"] for each in resized)
    report.target("hits of resized:288 at 20 % of the bytes", hits, 0.55, at_least=True)
    report.target("later epochs to reading what is missed", to_misses(resized), 1.15)


def to_misses(results: list[dict[str, float]]) -> float:
    return statistics.median(each["later_s"] / each["misses_s"] for each in results)


def train(paths: list[Path], stage: str) -> dict[str, float]:
    """Return what a training of some epochs hit, and how long it took."""
    source = SlowSource(
        FileSource(paths), latency=LATENCY, tail=0.0, bandwidth=BANDWIDTH, concurrency=16
    )
    dataset = stoker.SampleDataset(source, transform=Train(SIZE))
    seconds = []
    cache = stoker.Cache(SHARE, stage=stage)
    options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True}
    with stoker.Loader(dataset, BATCH, cache=cache, epochs=EPOCHS, **options) as loader:
        for _ in range(EPOCHS):
            began = time.monotonic()
            for _ in loader:
                pass
            seconds.append(time.monotonic() - began)
        later = loader.epoch_stats[1:]
    bytes_read = statistics.mean(each.bytes_from_source for each in later)
    return {
        "hits": sum(each.hits for each in later) / sum(each.accesses for each in later),
        "first_s": seconds[0],
        "later_s": statistics.mean(seconds[1:]),
        "later_bytes": bytes_read,
        "misses_s": max(bytes_read / BANDWIDTH, 1e-9),
    }


def decoding(report: Report, files: list[bytes], passes: int, rounds: int) -> None:
    """Compare processor time from bytes to pixels; then how much the pixels differ."""
    files = list(islice(cycle(files), TOGETHER))
    small = [bytes(Resized(288)(file)) for file in files]
    fills = contestants()
    batch = np.empty((len(files), 3, SIZE, SIZE), np.uint8)
    pillow, own = "Pillow, originals", "Train(224), resized:288"
    ways = {
        pillow: (fills["Pillow"], files),
        "Train(224), originals": (fills["Train(224)"], files),
        own: (fills["Train(224)"], small),
    }

    def timed(way: str) -> float:
        fill, data = ways[way]
        started = time.process_time()
        for each in range(passes):
            fill(data, range(1000 * each, 1000 * each + len(data)), batch)
        return (time.process_time() - started) / (passes * len(data))

    results = interleave({way: partial(timed, way) for way in ways}, rounds)
    for way, figures in results.items():
        median = statistics.median(figures)
        speed = paired_ratio(results[pillow], figures)
        report.row(decoding=way, ms_of_cpu=1e3 * median, speed_to_Pillow=speed)
    ratio = paired_ratio(results[pillow], results[own])
    report.target("speed from resized:288 to Pillow from originals", ratio, 2.5, at_least=True)
    made = interleave({"made": lambda: making(files, passes)}, rounds)["made"]
    report.remarks.append(f"making one takes {1e3 * statistics.median(made):.2f} ms of a core")


def pixels(report: Report, files: list[bytes]) -> None:
    """How much what a network sees differs from the same part of originals."""
    cut = Eval(256, SIZE)
    for name in FORMS:
        form = Resized.parse(name)
        assert form is not None
        small = [bytes(form(file)) for file in files]
        pairs = zip(files, small, strict=True)
        differences = [np.abs(cut(a).astype(int) - cut(b)).mean() for a, b in pairs]
        report.row(
            form=name,
            of_the_bytes=sum(map(len, small)) / sum(map(len, files)),
            mean_difference=statistics.mean(differences),
            largest_mean=max(differences),
        )


def making(files: list[bytes], passes: int) -> float:
    form, started = Resized(288), time.process_time()
    for _ in range(passes):
        for file in files:
            form(file)
    return (time.process_time() - started) / (passes * len(files))


if __name__ == "__main__":
    main()

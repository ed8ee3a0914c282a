"""Images for training: from JPEG bytes to u8[3, 224, 224] in a batch, by processor time.

Photographs of scikit-learn and scikit-image with a short side of 375, stored in 110 KB each as
ImageNet's are on average; and enlarged four times, as cameras give them. Every contestant cuts the
same random parts and writes into the same batch. ``Train(224)`` is the path of Loaders, with as
many images in a call as theirs; then what that is worth, and with libraries in place of our own
code. Then a Loader without workers, by the clock: one thread on one processor, two on two.
``--plot FILE.json`` measures nothing and draws what ``--json`` printed, as FILE.svg.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from harness import Report, interleave, paired_ratio, parser, show
from PIL import Image
from skimage import data
from sklearn.datasets import load_sample_images

from stoker.epoch.cached import TOGETHER
from stoker.images import Canvas, Train, decode, resize, transforms
from stoker.pytorch import Loader, SampleDataset
from stoker.source.held import MemorySource

SIZE, SHORT_SIDE, BYTES, ENLARGED = 224, 375, 110_000, 4
Cut = Callable[[bytes, np.random.Generator, np.ndarray], object]
Fill = Callable[[Sequence[bytes], Sequence[int], np.ndarray], object]
"""Makes images, each with the seed of its random part, into a batch."""


def main() -> None:
    """Parse the arguments, measure, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--plot", type=Path, help="the JSON of an earlier run, to be drawn")
    args = arguments.parse_args()
    if args.plot:
        plot(json.loads(args.plot.read_text())["rows"], args.plot.with_suffix(".svg"))
        return
    rounds = 1 if args.smoke else args.rounds
    passes = 1 if args.smoke else 5
    report = Report("Images for training, from JPEG to a part of 224 x 224", args.smoke)
    ordinary = [stored(photograph) for photograph in photographs()]
    mean = statistics.mean(map(len, ordinary))
    report.remarks.append(
        f"{len(ordinary)} photographs of {mean / 1000:.0f} KB on average; Train(224) and what is "
        f"with libraries or Pillow only take {TOGETHER} a call, as Loaders do, the others one."
    )
    results = measure("110 KB", ordinary, passes, rounds, report)
    own = results["Train(224)"]
    for name, least in (
        ("Pillow", 2),
        ("simplejpeg + Pillow", 1.3),
        ("Train(224) with libraries", 1.3),
    ):
        report.target(f"speed to {name}", paired_ratio(results[name], own), least, at_least=True)
    large = [stored(enlarged(photograph), quality=90) for photograph in photographs()]
    measure("enlarged", large, 1, rounds, report)
    threads = interleave(
        {
            name: lambda count=count: seconds_of_loader(ordinary, count, 76 * passes)
            for name, count in (("1 thread", 1), ("2 threads", 2))
        },
        rounds,
    )
    for name, figures in threads.items():
        median = statistics.median(figures)
        report.row(photographs="110 KB", contestant=f"Loader, {name}", images_per_second=1 / median)
    ratio = paired_ratio(threads["1 thread"], threads["2 threads"])
    report.target("two threads on two cores to one", ratio, 1.8, at_least=True)
    show(args, report)


def plot(rows: list[dict[str, Any]], target: Path) -> None:
    """Draw the images a second that a core makes, by contestant and kind of photograph."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "images"
    pyplot.rcParams["svg.fonttype"] = "none"
    kinds = list(dict.fromkeys(row["photographs"] for row in rows))
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(9, 2.9), layout="constrained")
    for kind, axis in zip(kinds, axes, strict=True):
        shown = [row for row in rows if row["photographs"] == kind and row.get("ms_of_cpu")]
        names = [row["contestant"] for row in shown]
        colours = ["#0072b2" if name.startswith("Train") else "#999999" for name in names]
        bars = axis.barh(names, [row["images_per_second"] for row in shown], color=colours)
        axis.bar_label(bars, [f"{row['images_per_second']:.0f}" for row in shown], padding=3)
        axis.set(title=kind)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Images a second a core")
    figure.savefig(target, metadata={"Date": None})


def photographs() -> Iterator[Image.Image]:
    """Yield photographs with a short side of 375 pixels."""
    arrays = [*load_sample_images().images, data.astronaut(), data.coffee(), data.cat()]
    for array in [*arrays, data.rocket()]:
        image = Image.fromarray(array)
        factor = SHORT_SIDE / min(image.size)
        size = (round(image.width * factor), round(image.height * factor))
        yield image.resize(size, Image.Resampling.LANCZOS)


def enlarged(image: Image.Image) -> Image.Image:
    size = (ENLARGED * image.width, ENLARGED * image.height)
    return image.resize(size, Image.Resampling.LANCZOS)


def stored(image: Image.Image, quality: int | None = None) -> bytes:
    """Return the JPEG file; without a quality that which is nearest to 110 KB."""
    files = []
    for each in range(80, 101) if quality is None else (quality,):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=each)
        files.append(buffer.getvalue())
    return min(files, key=lambda file: abs(len(file) - BYTES))


def contestants() -> dict[str, Fill]:
    train = Train(SIZE)

    def as_loaders_do(files: Sequence[bytes], seeds: Sequence[int], batch: np.ndarray) -> None:
        canvas = Canvas(train, seeds, batch)
        for start in range(0, len(files), TOGETHER):
            rows = range(start, min(start + TOGETHER, len(files)))
            canvas.finish({row: canvas.begin(row, files[row]) for row in rows})

    def one_by_one(cut: Cut) -> Fill:
        def fill(files: Sequence[bytes], seeds: Sequence[int], batch: np.ndarray) -> None:
            for raw, seed, out in zip(files, seeds, batch, strict=True):
                cut(raw, np.random.default_rng(seed), out)

        return fill

    # As torchvision's transforms do with PIL images.
    def lay(image: Image.Image, rng: np.random.Generator, out: np.ndarray) -> None:
        box, is_flipped, _ = train.cut(*image.size, rng)
        left, top, width, height = box
        part = image.crop((left, top, left + width, top + height))
        part = part.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if is_flipped:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        out[...] = np.asarray(part).transpose(2, 0, 1)

    def pillow(raw: bytes, rng: np.random.Generator, out: np.ndarray) -> None:
        lay(Image.open(io.BytesIO(raw)).convert("RGB"), rng, out)

    def both(raw: bytes, rng: np.random.Generator, out: np.ndarray) -> None:
        lay(Image.fromarray(simplejpeg.decode_jpeg(raw)), rng, out)

    def without_own(files: Sequence[bytes], seeds: Sequence[int], batch: np.ndarray) -> None:
        kept, resize.native = resize.native, lambda: None
        try:
            as_loaders_do(files, seeds, batch)
        finally:
            resize.native = kept

    def without_libraries(files: Sequence[bytes], seeds: Sequence[int], batch: np.ndarray) -> None:
        kept = decode.simplejpeg, resize.cykooz_resizer
        decode.simplejpeg = resize.cykooz_resizer = lambda: None
        try:
            without_own(files, seeds, batch)
        finally:
            decode.simplejpeg, resize.cykooz_resizer = kept

    # What resizing alone gains: a library decodes.
    def resized_by_own(files: Sequence[bytes], seeds: Sequence[int], batch: np.ndarray) -> None:
        kept, transforms.jpeg_job = transforms.jpeg_job, lambda *_: None
        try:
            as_loaders_do(files, seeds, batch)
        finally:
            transforms.jpeg_job = kept

    return {
        "Pillow": one_by_one(pillow),
        "simplejpeg + Pillow": one_by_one(both),
        "Train(224)": as_loaders_do,
        "Train(224), one by one": one_by_one(train),
        "Train(224), only resized by us": resized_by_own,
        "Train(224) with libraries": without_own,
        "Train(224) with Pillow only": without_libraries,
    }


def measure(
    kind: str, files: list[bytes], passes: int, rounds: int, report: Report
) -> dict[str, list[float]]:
    """Return processor seconds an image, by contestant and round; adds their rows."""
    files = list(islice(cycle(files), TOGETHER))
    batch = np.empty((len(files), 3, SIZE, SIZE), np.uint8)

    def timed(fill: Fill) -> float:
        started = time.process_time()
        for each in range(passes):
            fill(files, range(1000 * each, 1000 * each + len(files)), batch)
        return (time.process_time() - started) / (passes * len(files))

    def made(fill: Fill) -> np.ndarray:
        fill(files, range(len(files)), batch)
        return batch.astype(np.float32)

    fills = contestants()
    reference = made(fills["Pillow"])
    results = interleave(
        {name: lambda fill=fill: timed(fill) for name, fill in fills.items()}, rounds
    )
    for name, figures in results.items():
        report.row(
            photographs=kind,
            contestant=name,
            ms_of_cpu=1e3 * statistics.median(figures),
            images_per_second=1 / statistics.median(figures),
            speed_to_Pillow=paired_ratio(results["Pillow"], figures),
            mean_difference=float(np.abs(made(fills[name]) - reference).mean()),
        )
    return results


def seconds_of_loader(files: list[bytes], threads: int, passes: int) -> float:
    """Return the seconds an image that a Loader with so many threads and processors takes."""
    dataset = SampleDataset(MemorySource(files * passes), transform=Train(SIZE))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:threads])
    try:
        with Loader(dataset, batch_size=16, cache=0, decode_threads=threads) as loader:
            started = time.perf_counter()
            count = sum(len(images) for images in loader)
            return (time.perf_counter() - started) / count
    finally:
        os.sched_setaffinity(0, allowed)


if __name__ == "__main__":
    main()

"""Measure a storage through a Source, and say what the measurements mean for training.

It measures the latency of single reads, and throughput at growing concurrency. No sample is read
twice (unless there is only one), so that what an earlier read left in a cache does not count.
"""

from __future__ import annotations

import importlib.util
import math
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from stoker import bounds
from stoker.errors import SampleCorrupt, StokerError
from stoker.node.memory import read_memory
from stoker.source.base import Source
from stoker.source.image_folder import IMAGE_EXTENSIONS
from stoker.types import format_bytes

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
PERCENTILES = (50, 90, 99)
_KEPT = 64
"""Samples kept for measuring what decoding costs."""
_FIRST = 2.0
"""How much longer the step of single reads lasts than the others: its tail is of interest."""
_STAGE = "resized:288"
"""The stage that is measured: what 224 pixels are cut from."""
_SMALL = 256 << 10  # bytes of a sample, below which requests may bind sooner than bytes
_WORTH = 0.8
"""Factor below which smaller samples are worth making, where that makes no epoch longer."""
_USUAL = 0.2
"""Share to cache where less would do: reading ahead needs a cache."""


@dataclass(frozen=True)
class Step:
    """What was reached at one concurrency."""

    concurrency: int
    reads: int
    num_bytes: int
    seconds: float

    @property
    def reads_per_second(self) -> float:
        """Samples a second."""
        return self.reads / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second."""
        return self.num_bytes / self.seconds


@dataclass
class Probe:
    """What was measured."""

    latency: dict[str, float] = field(default_factory=dict)
    """Seconds of a single read: ``p50``, ``p90``, ``p99``, ``max``."""
    steps: list[Step] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    """Some of the samples."""

    @property
    def best(self) -> Step:
        """The step that delivered the most samples a second."""
        return max(self.steps, key=lambda step: step.reads_per_second)


def probe(source: Source, *, seconds: float, most_bytes: int, seed: int = 0) -> Probe:
    """Measure for about ``seconds``, reading ``most_bytes`` or slightly more, in random order.

    A step that has started is finished, which takes longer on storage that stalls. ``source`` has
    at least one sample. Raises the StokerError of a read that fails.
    """
    order = np.random.default_rng(seed).permutation(len(source)).astype(np.uint32)
    order = order[np.cumsum(source.sizes[order]) <= max(most_bytes, source.sizes[order[0]])]
    found = Probe()
    source.read(order[:1])  # starts what reading needs: connections, a helper process
    order = order[1:] if len(order) > 1 else order
    slot = seconds / (len(CONCURRENCIES) - 1 + _FIRST)
    for step, concurrency in enumerate(CONCURRENCIES):
        share = _share(CONCURRENCIES[step:])
        ids = order[: max(1, int(len(order) * share))]
        if step and len(ids) < 2 * concurrency:
            break  # too few left to fill so many lanes
        limit = slot * _FIRST if not step else slot
        readers = _Readers(source, ids, concurrency, limit)
        found.steps.append(readers.run())
        order = order[readers.taken :]
        if not step:
            found.kept = readers.kept
            found.latency = _percentiles(np.array(readers.latencies))
    return found


def _share(left: tuple[int, ...]) -> float:
    """Return the share of the remaining samples for the first of the remaining steps."""
    weights = np.sqrt(left)
    return float(weights[0] / weights.sum())


def _percentiles(latencies: NDArray[np.float64]) -> dict[str, float]:
    found = {f"p{p}": float(np.percentile(latencies, p)) for p in PERCENTILES}
    return found | {"max": float(latencies.max())}


class _Readers:
    """Threads that each read one sample after the other; each sample is read by one thread."""

    def __init__(
        self, source: Source, ids: NDArray[np.uint32], concurrency: int, seconds: float
    ) -> None:
        self.taken = 0
        self.kept: list[bytes] = []
        self.latencies: list[float] = []
        self._source, self._ids, self._seconds = source, ids, seconds
        self._concurrency = concurrency
        self._bytes, self._deadline = 0, 0.0
        self._mutex = threading.Lock()
        self._error: StokerError | None = None

    def run(self) -> Step:
        """Read until the time is over or all samples are read."""
        lanes = range(self._concurrency)
        threads = [threading.Thread(target=self._read, daemon=True) for _ in lanes]
        begin = time.perf_counter()
        self._deadline = begin + self._seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        if self._error is not None:
            raise self._error
        return Step(self._concurrency, len(self.latencies), self._bytes, seconds)

    def _read(self) -> None:
        while (ids := self._next()) is not None:
            begin = time.perf_counter()
            try:
                (sample,) = self._source.read(ids)
            except StokerError as error:
                self._error = error
                return
            took = time.perf_counter() - begin
            with self._mutex:
                self.latencies.append(took)
                self._bytes += len(sample)
                if len(self.kept) < _KEPT:
                    self.kept.append(sample)

    def _next(self) -> NDArray[np.uint32] | None:
        with self._mutex:
            over = time.perf_counter() >= self._deadline and self.taken
            if over or self.taken >= len(self._ids) or self._error is not None:
                return None
            self.taken += 1
            return self._ids[self.taken - 1 : self.taken]


def diagnose(url: str, source: Source, found: Probe, compute_rate: float | None) -> dict[str, Any]:
    """Return all findings about a storage, in bytes, seconds and samples per second."""
    data_bytes, cores = int(source.sizes.sum()), len(os.sched_getaffinity(0))
    available = read_memory().available
    decode = _decode_seconds(source, found.kept)
    rates = bounds.Rates(
        found.best.reads_per_second, None if decode is None else cores / decode, compute_rate
    )
    is_local = "://" not in url or url.startswith("file://")
    advice = _advise(rates, data_bytes, available // 2, decode, cores)
    resized = None if decode is None else _measure_resized(found.kept)
    if resized is not None:
        resized |= _with_resized(rates, resized, advice["cached"], cores)
    return {
        "url": url,
        "samples": len(source),
        "bytes": data_bytes,
        "latency": found.latency,
        "steps": [
            asdict(step)
            | {"reads_per_second": step.reads_per_second, "bytes_per_second": step.bytes_per_second}
            for step in found.steps
        ],
        "decode_seconds": decode,
        "resized": resized,
        "rates": asdict(rates),
        "bound_by": bounds.bound_by(rates),
        "largest_miss_ratio": bounds.largest_miss_ratio(rates),
        "smallest_cache": bounds.smallest_cache(rates),
        "epoch_without_cache": _epoch(rates, len(source), 0.0),
        "epoch_with_advice": _epoch(rates, len(source), advice["cached"]),
        "page_cache": {"applies": is_local, "suffices": is_local and data_bytes <= available},
        "advice": advice,
        "notes": _notes(found, is_local) + _note_on_blocks(rates, data_bytes / len(source)),
    }


def _epoch(rates: bounds.Rates, num_samples: int, cached: float) -> dict[str, Any]:
    found = bounds.epoch(rates, num_samples, cached)
    return asdict(found) | {"stall_share": found.stall_share}


def _advise(
    rates: bounds.Rates, data_bytes: int, room: int, decode: float | None, cores: int
) -> dict[str, Any]:
    """Return the arguments for the Loader; ``room``: bytes of memory that a cache may take.

    ``cache`` is a size, or a dict of the arguments of a :class:`stoker.Cache`.
    """
    needed = bounds.smallest_cache(rates)
    fits = min(1.0, room / data_bytes) if data_bytes else 1.0
    percent = math.ceil(100 * max(_USUAL, 1.0 if needed is None else needed) - 1e-9)
    in_memory = percent / 100 if percent / 100 <= fits else fits
    memory = f"{percent}%" if in_memory < fits or fits == 1 else f"{room >> 20}MiB"
    needs_disk = needed is not None and needed > fits
    cache = {"memory": memory, "disk": "/a/local/disk"} if needs_disk else memory
    workers = min(4, cores)
    if decode is not None:
        wanted = rates.compute or bounds.rate_fed(rates.storage, in_memory)
        workers = bounds.workers_for(min(wanted, cores / decode), decode, cores)
    arguments = {"cache": cache, "num_workers": workers}
    # The disk's default size is everything.
    return {"arguments": arguments, "cached": 1.0 if needs_disk else in_memory}


def _decode_seconds(source: Source, samples: list[bytes]) -> float | None:
    """Return processor seconds to decode one of ``samples``; None if they are no images."""
    is_image = source.name(0).lower().endswith(IMAGE_EXTENSIONS)
    if not is_image or importlib.util.find_spec("torch") is None:
        return None
    from stoker.images import decode_image

    try:
        decode_image(samples[0])  # loads the decoder
        begin = time.process_time()
        for sample in samples:
            decode_image(sample)
    except SampleCorrupt:
        return None
    return max(1e-9, (time.process_time() - begin) / len(samples))


def _measure_resized(samples: list[bytes]) -> dict[str, Any] | None:
    """Return what cached samples of :data:`_STAGE` are like; None if it makes none smaller.

    ``factor``: their bytes / those of the samples; processor seconds of one ``make_seconds`` and
    ``decode_seconds``.
    """
    from stoker.images import decode_image
    from stoker.images.resize import Resized

    form = Resized.parse(_STAGE)
    if form is None or importlib.util.find_spec("simplejpeg") is None:
        return None
    form(samples[0])  # loads what it needs
    begin = time.process_time()
    small = [form(sample) for sample in samples]
    made = time.process_time()
    try:
        for sample in small:
            decode_image(sample)
    except SampleCorrupt:
        return None
    decoded = time.process_time()
    factor = sum(map(len, small)) / sum(map(len, samples))
    if factor == 1:
        return None
    return {
        "stage": _STAGE,
        "factor": factor,
        "make_seconds": (made - begin) / len(samples),
        "decode_seconds": (decoded - made) / len(samples),
    }


def _with_resized(
    rates: bounds.Rates, resized: dict[str, Any], cached: float, cores: int
) -> dict[str, Any]:
    """Return what a cache for a share ``cached`` of the data holds resized, and if that helps."""
    held = min(1.0, cached / resized["factor"])
    work = (1 - held) * resized["make_seconds"] + resized["decode_seconds"]
    usual = bounds.epoch(rates, 1, cached).seconds
    then = bounds.Rates(rates.storage, cores / max(work, 1e-9), rates.compute)
    seconds = bounds.epoch(then, 1, held).seconds
    helps = bounds.bound_by(rates) == "storage" and resized["factor"] < _WORTH
    return {"cached": held, "is_worth_it": helps and seconds <= usual, "of_epoch": seconds / usual}


def _notes(found: Probe, is_local: bool) -> list[str]:
    notes = []
    if is_local:
        notes.append(
            "reads from the page cache make the storage look faster than it is: measure data "
            "that was not read recently"
        )
    steps = found.steps
    if len(steps) < len(CONCURRENCIES):
        notes.append(
            f"measured up to {steps[-1].concurrency} reads at once: more would have needed more "
            "unread samples"
        )
    elif steps[-1] is found.best and steps[-1].reads_per_second > 1.2 * steps[-2].reads_per_second:
        notes.append("throughput still grew at the highest concurrency: the maximum may be higher")
    return notes


def _note_on_blocks(rates: bounds.Rates, mean_size: float) -> list[str]:
    """Return what to say where storage may be bound by requests: nothing for large samples."""
    if bounds.bound_by(rates) != "storage" or mean_size > _SMALL:
        return []
    return [
        f"samples of {format_bytes(round(mean_size))} are small: if it is requests that bind here, "
        "and not bytes, `stoker pack` and recipe='foresight:block=32' read 32 with one (docs/"
        "foresight.md)"
    ]


def show_diagnosis(facts: dict[str, Any], console: Console) -> None:
    """Print the measurements as a table, then their meaning, one line each."""
    table = Table(title=facts["url"], title_style="bold", title_justify="left")
    for name in ("reads at once", "reads/s", "bandwidth", "reads measured"):
        table.add_column(name, justify="right")
    for step in facts["steps"]:
        table.add_row(
            str(step["concurrency"]),
            f"{step['reads_per_second']:,.0f}",
            f"{format_bytes(step['bytes_per_second'])}/s",
            f"{step['reads']:,}",
        )
    console.print()
    console.print(table)
    lines = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    lines.add_column(style="bold")
    lines.add_column(overflow="fold")
    for name, text in _lines(facts):
        lines.add_row(name, text)
    console.print(lines)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    latency, rates = facts["latency"], facts["rates"]
    times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in latency.items())
    lines = [
        ("data", f"{facts['samples']:,} samples, {format_bytes(facts['bytes'])}"),
        ("latency of a read", times),
        ("storage gives", f"{rates['storage']:,.0f} samples/s"),
    ]
    if rates["decode"] is not None:
        each = f"{1e6 * facts['decode_seconds']:.0f} µs each"
        lines.append(("decoding", f"{rates['decode']:,.0f} samples/s on all processors, {each}"))
    if rates["compute"] is not None:
        lines.append(("training", f"{rates['compute']:,.0f} samples/s, as given"))
    lines += [("bound by", _bound_line(facts)), *_cache_lines(facts)]
    return lines + [("note", note) for note in facts["notes"]]


def _bound_line(facts: dict[str, Any]) -> str:
    first = facts["epoch_without_cache"]
    known = f"{facts['bound_by']}; an epoch takes at least {first['seconds']:,.1f} s"
    if first["stall_seconds"] is None:
        rate = facts["rates"]["storage"]
        return f"{known}; training that is faster than {rate:,.0f} samples/s waits (--compute-rate)"
    return f"{known}, of which training waits {first['stall_share']:.0%}"


def _cache_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    needed = facts["smallest_cache"]
    if needed is not None:
        size = format_bytes(needed * facts["bytes"])
        text = f"{needed:.0%} of the data, {size}: with it" if needed else "none: even without one"
        pace = "decoding" if facts["rates"]["compute"] is None else "training"
        lines.append(("smallest cache", f"{text} storage keeps up with {pace}"))
    if facts["page_cache"]["applies"]:
        enough = "holds all of it from the second epoch on: Stoker's cache adds little"
        text = enough if facts["page_cache"]["suffices"] else "is too small for the data"
    else:
        text = "does not keep objects"
    later = facts["epoch_with_advice"]
    fed = f"later epochs at least {later['seconds']:,.1f} s"
    if later["stall_share"] is not None:
        fed += f", training waits {later['stall_share']:.0%}"
    arguments = _written(facts["advice"]["arguments"])
    lines += [("page cache", text), ("advice", f"Loader(..., {arguments}): {fed}")]
    resized = facts["resized"]
    return lines if resized is None else [*lines, _resized_line(resized, later["seconds"])]


def _resized_line(resized: dict[str, Any], seconds: float) -> tuple[str, str]:
    text = (
        f"stoker.Cache(..., stage={resized['stage']!r}) keeps {resized['factor']:.0%} of the "
        f"bytes, so that as large a cache holds {resized['cached']:.0%} of the samples, for "
        f"{1e3 * resized['make_seconds']:.1f} ms of processor time where one is read"
    )
    if not resized["is_worth_it"]:
        return "smaller images", f"{text}: no gain here"
    later = resized["of_epoch"] * seconds
    advice = "and of the pixels a little changes: see docs/images.md"
    return "smaller images", f"{text}: later epochs at least {later:,.1f} s, {advice}"


def _written(arguments: dict[str, Any]) -> str:
    """Return arguments as they stand in a call."""
    shown = {
        name: f"stoker.Cache({_written(value)})" if isinstance(value, dict) else repr(value)
        for name, value in arguments.items()
    }
    return ", ".join(f"{name}={value}" for name, value in shown.items())

"""From measurements of a storage to what they mean for training, as primitives and as text."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from stoker import bounds
from stoker.cli._storage_probe import CONCURRENCIES, Probe
from stoker.errors import SampleCorrupt
from stoker.source.base import Source
from stoker.source.folder_listing import IMAGE_EXTENSIONS
from stoker.store.memory_limits import read_memory
from stoker.types import format_bytes

_USUAL = 0.2
"""Share to cache where less would do: a cache costs nothing, and reading ahead needs one."""


def diagnose(url: str, source: Source, found: Probe, compute_rate: float | None) -> dict[str, Any]:
    """Return everything there is to say of a storage; bytes, seconds, samples a second."""
    data_bytes, cores = int(source.sizes.sum()), len(os.sched_getaffinity(0))
    available = read_memory().available
    decode = _decode_seconds(source, found.kept)
    rates = bounds.Rates(
        found.best.reads_per_second, None if decode is None else cores / decode, compute_rate
    )
    is_local = "://" not in url or url.startswith("file://")
    advice = _advise(rates, data_bytes, available // 2, decode, cores)
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
        "rates": asdict(rates),
        "bound_by": bounds.bound_by(rates),
        "largest_miss_ratio": bounds.largest_miss_ratio(rates),
        "smallest_cache": bounds.smallest_cache(rates),
        "epoch_without_cache": _epoch(rates, len(source), 0.0),
        "epoch_with_advice": _epoch(rates, len(source), advice["cached"]),
        "page_cache": {"applies": is_local, "suffices": is_local and data_bytes <= available},
        "advice": advice,
        "notes": _notes(found, is_local),
    }


def _epoch(rates: bounds.Rates, num_samples: int, cached: float) -> dict[str, Any]:
    found = bounds.epoch(rates, num_samples, cached)
    return asdict(found) | {"stall_share": found.stall_share}


def _advise(
    rates: bounds.Rates, data_bytes: int, room: int, decode: float | None, cores: int
) -> dict[str, Any]:
    """Return the arguments for the Loader; ``room``: bytes of memory that a cache may take."""
    needed = bounds.smallest_cache(rates)
    fits = min(1.0, room / data_bytes) if data_bytes else 1.0
    percent = math.ceil(100 * max(_USUAL, 1.0 if needed is None else needed) - 1e-9)
    in_memory = percent / 100 if percent / 100 <= fits else fits
    arguments: dict[str, Any] = {}
    arguments["cache"] = f"{percent}%" if in_memory < fits or fits == 1 else f"{room >> 20}MiB"
    needs_disk = needed is not None and needed > fits
    if needs_disk:
        arguments["cache_dir"] = "/a/local/disk"
    workers = min(4, cores)
    if decode is not None:
        wanted = rates.compute or bounds.rate_fed(rates.storage, in_memory)
        workers = bounds.workers_for(min(wanted, cores / decode), decode, cores)
    arguments["num_workers"] = workers
    # The disk's default size is everything.
    return {"arguments": arguments, "cached": 1.0 if needs_disk else in_memory}


def _decode_seconds(source: Source, samples: list[bytes]) -> float | None:
    """Return processor seconds to decode one of ``samples``; None if they are no images."""
    is_image = source.name(0).lower().endswith(IMAGE_EXTENSIONS)
    if not is_image or importlib.util.find_spec("torch") is None:
        return None
    from stoker.pytorch.decode import decode_image

    try:
        decode_image(samples[0])  # loads the decoder
        begin = time.process_time()
        for sample in samples:
            decode_image(sample)
    except SampleCorrupt:
        return None
    return max(1e-9, (time.process_time() - begin) / len(samples))


def _notes(found: Probe, is_local: bool) -> list[str]:
    notes = []
    if is_local:
        notes.append(
            "what the page cache held was not read from storage, which then looks better than it "
            "is: measure data that was not read lately"
        )
    steps = found.steps
    if len(steps) < len(CONCURRENCIES):
        notes.append(
            f"measured up to {steps[-1].concurrency} reads at once: more would have needed samples "
            "that were not read before"
        )
    elif steps[-1] is found.best and steps[-1].reads_per_second > 1.2 * steps[-2].reads_per_second:
        notes.append("throughput still grew at the highest concurrency: there may be more")
    return notes


def show_diagnosis(facts: dict[str, Any], console: Console) -> None:
    """Print the measurements as a table, then what they mean, a line each."""
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
        enough = "holds all of it from the second epoch on: a cache of Stoker's adds little"
        text = enough if facts["page_cache"]["suffices"] else "is too small for the data"
    else:
        text = "does not keep objects"
    later = facts["epoch_with_advice"]
    fed = f"later epochs at least {later['seconds']:,.1f} s"
    if later["stall_share"] is not None:
        fed += f", training waits {later['stall_share']:.0%}"
    arguments = ", ".join(f"{k}={v!r}" for k, v in facts["advice"]["arguments"].items())
    return [*lines, ("page cache", text), ("advice", f"Loader(..., {arguments}): {fed}")]

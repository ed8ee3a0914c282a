"""What a training did, epoch by epoch, as an HTML page that needs nothing but itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.epoch import html
from stoker.epoch.stats import Stats
from stoker.errors import ConfigError
from stoker.jobs.metrics import WAIT_SECONDS, quantile
from stoker.types import format_bytes

_BUCKETS = 24  # of sizes
_HEAD = (
    "epoch", "samples", "hits", "most hits", "substituted", "packaged", "fetched", "from source",
    "seconds", "waits",
)  # fmt: skip


def write_report(
    path: str | os.PathLike[str],
    facts: Mapping[str, Any],
    epochs: Sequence[Stats],
    waits: Sequence[int],
    sizes: NDArray[np.int64],
    cache_bytes: int,
) -> None:
    """Write the page to ``path``.

    ``epochs`` are the counts of each; ``waits`` for batches are in the buckets of
    ``stoker.jobs.metrics``; ``sizes`` (``i64[n]``) are those of the samples that are visited.
    Raises :class:`~stoker.errors.ConfigError` without an epoch, and OSError.
    """
    if not epochs:
        raise ConfigError("no epoch has ended: there is nothing to report yet")
    most = most_hits(sizes, cache_bytes)
    parts = [
        *_of_epochs(epochs, most),
        *_of_waits(waits),
        *_of_sizes(sizes, cache_bytes),
    ]
    Path(path).write_text(html.page("What training did", facts, parts), encoding="utf-8")


def shown(told: str, epochs: Sequence[Stats]) -> str:
    """Return what a Loader or Feed shows in a notebook: what it is, and a row for each epoch."""
    head, rows = [*_HEAD], [[*_row(str(n), each, 0.0)] for n, each in enumerate(epochs, 1)]
    for row in [head, *rows]:
        del row[_HEAD.index("most hits")]
    if not rows:
        return f"<p>{escape(told)}: no epoch has ended yet</p>"
    return f"<p>{escape(told)}</p>{html.table(head, rows)}<p>{escape(epochs[-1].verdict)}</p>"


def most_hits(sizes: NDArray[np.int64], cache_bytes: int) -> float:
    """Return the share of accesses that can hit at most where each sample is visited once an epoch.

    The smallest of the samples of ``sizes`` (``i64[n]``) that fit into the cache.
    """
    held = np.searchsorted(np.sort(sizes).cumsum(), cache_bytes, side="right")
    return float(held) / max(1, len(sizes))


def _of_epochs(epochs: Sequence[Stats], most: float) -> Iterator[str]:
    yield f"<p>{escape(epochs[-1].verdict)}</p>"
    names = [str(number) for number in range(1, len(epochs) + 1)]
    hits = [epoch.hit_ratio for epoch in epochs]
    stalls = [epoch.stall_share for epoch in epochs]
    limit = "most with one visit of each sample an epoch", most
    yield html.bars("Hits, % of the samples of an epoch", names, hits, _percent(hits), limit)
    yield html.bars("Waiting, % of the time of an epoch", names, stalls, _percent(stalls))
    yield '<h2>Epochs</h2><div class="wide">'
    yield html.table(_HEAD, [_row(*numbered, most) for numbered in zip(names, epochs, strict=True)])
    yield "</div><p>The first epoch fills the cache. Recipes that repeat samples can hit more.</p>"


def _row(name: str, epoch: Stats, most: float) -> Sequence[str]:
    return (
        name,
        f"{epoch.accesses:,}",
        f"{epoch.hit_ratio:.1%}",
        f"{most:.1%}",
        f"{epoch.substituted:,}",
        f"{epoch.packaged:,}",
        f"{epoch.fetched:,}",
        format_bytes(epoch.bytes_from_source),
        f"{epoch.epoch_seconds:.2f}",
        f"{epoch.stall_share:.1%}",
    )


def _of_waits(waits: Sequence[int]) -> Iterator[str]:
    yield "<h2>Waits for a batch</h2>"
    p50, p99 = (1000 * quantile(waits, share) for share in (0.5, 0.99))
    yield f"<p>{sum(waits):,} batches; p50 {p50:.1f} ms, p99 {p99:.1f} ms</p>"
    names = [*(f"{1000 * edge:.3g}" for edge in WAIT_SECONDS), "more"]
    shown = [f"{count:,} batches" for count in waits]
    yield html.bars("Batches, by ms waited at most", names, waits, shown)


def _of_sizes(sizes: NDArray[np.int64], cache_bytes: int) -> Iterator[str]:
    yield "<h2>Sizes of samples</h2>"
    total = int(sizes.sum())
    held = f"{min(1.0, cache_bytes / total):.1%}" if total else "all"
    yield (
        f"<p>{len(sizes):,} samples, {format_bytes(total)}; the cache has room for "
        f"{format_bytes(cache_bytes)}, {held} of them</p>"
    )
    counts, edges = np.histogram(sizes, bins=_BUCKETS)
    names = [format_bytes(int(edge)) for edge in edges[1:]]
    shown = [f"{count:,} samples" for count in counts.tolist()]
    yield html.bars("Samples, by bytes at most", names, counts.tolist(), shown)


def _percent(shares: Sequence[float]) -> list[str]:
    return [f"{share:.1%}" for share in shares]

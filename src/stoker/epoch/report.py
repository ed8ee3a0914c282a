"""What a training did, epoch by epoch, and other tables and bars, as HTML that loads nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.stats import Stats
from stoker.errors import ConfigError
from stoker.jobs.metrics import WAIT_SECONDS, quantile
from stoker.types import format_bytes

_BUCKETS = 24  # of sizes
_HEAD = (
    "epoch", "samples", "hits", "most hits", "substituted", "packaged", "fetched", "from source",
    "seconds", "waits",
)  # fmt: skip

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1080px; color: #222;
       background: #fff; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
svg { width: 100%; max-width: 900px; height: auto; font-family: system-ui, sans-serif; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .6em; text-align: right; border-bottom: 1px solid #e4e4e4; }
th, td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #888; font-weight: 600; } tr.best td { font-weight: 600; }
p.facts { color: #555; } div.wide { overflow-x: auto; }
"""

_WIDTH, _HEIGHT = 760, 260
_LEFT, _TOP, _BOTTOM = 58, 34, 46
_MOST_LABELS = 24


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
    Path(path).write_text(page("What training did", facts, parts), encoding="utf-8")


def shown(told: str, epochs: Sequence[Stats]) -> str:
    """Return what a Loader or Feed shows in a notebook: what it is, and a row for each epoch."""
    head, rows = [*_HEAD], [[*_row(str(n), each, 0.0)] for n, each in enumerate(epochs, 1)]
    for row in [head, *rows]:
        del row[_HEAD.index("most hits")]
    if not rows:
        return f"<p>{escape(told)}: no epoch has ended yet</p>"
    return f"<p>{escape(told)}</p>{table(head, rows)}<p>{escape(epochs[-1].verdict)}</p>"


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
    yield bars("Hits, % of the samples of an epoch", names, hits, _percent(hits), limit)
    yield bars("Waiting, % of the time of an epoch", names, stalls, _percent(stalls))
    yield '<h2>Epochs</h2><div class="wide">'
    yield table(_HEAD, [_row(*numbered, most) for numbered in zip(names, epochs, strict=True)])
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
    yield bars("Batches, by ms waited at most", names, waits, shown)


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
    yield bars("Samples, by bytes at most", names, counts.tolist(), shown)


def _percent(shares: Sequence[float]) -> list[str]:
    return [f"{share:.1%}" for share in shares]


def page(title: str, facts: Mapping[str, Any], parts: Iterable[str]) -> str:
    """Return a whole page; ``facts`` are named at its beginning, ``parts`` are HTML."""
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style></head><body>",
            f'<h1>{escape(title)}</h1><p class="facts">{escape(told)}</p>',
            *parts,
            "</body></html>\n",
        ]
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a ``<table>``; cells are text."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = [
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return "\n".join(
        [f"<table><thead><tr>{titles}</tr></thead><tbody>", *lines, "</tbody></table>"]
    )


def bars(
    title: str,
    labels: Sequence[str],
    values: Sequence[float],
    shown: Sequence[str],
    limit: tuple[str, float] | None = None,
) -> str:
    """Return an ``<svg>`` with a bar for each of ``values`` (0 or more, of the length of the rest).

    ``shown`` is what a bar says when it is pointed at; ``limit``, a name and a value, a line above.
    """
    highest = max([*values, 0.0 if limit is None else limit[1]], default=0.0) or 1.0
    bottom, step = _HEIGHT - _BOTTOM, (_WIDTH - _LEFT - 20) / max(1, len(values))
    every = -(-len(values) // _MOST_LABELS)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}" xmlns="http://www.w3.org/2000/svg">',
        f'<text x="{_LEFT}" y="20" font-weight="bold" font-size="13">{escape(title)}</text>',
        f'<path d="M{_LEFT} {bottom}H{_WIDTH - 20}" stroke="#888"/>',
    ]
    for at, (label, value, told) in enumerate(zip(labels, values, shown, strict=True)):
        x, height = _LEFT + at * step, (bottom - _TOP) * value / highest
        parts.append(
            f'<rect x="{x + 0.1 * step:.1f}" y="{bottom - height:.1f}" width="{0.8 * step:.1f}" '
            f'height="{height:.1f}" fill="#0072b2"><title>{escape(f"{label}: {told}")}</title>'
            "</rect>"
        )
        if at % every == 0:
            parts.append(
                f'<text x="{x + step / 2:.1f}" y="{bottom + 16}" text-anchor="middle" '
                f'font-size="10">{escape(label)}</text>'
            )
    if limit is not None:
        y = bottom - (bottom - _TOP) * limit[1] / highest
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 20}" stroke="#000" stroke-dasharray="1 4"/>'
            f'<text x="{_WIDTH - 20}" y="{y - 4:.1f}" text-anchor="end" font-size="11">'
            f"{escape(limit[0])}</text>"
        )
    return "\n".join([*parts, "</svg>"])

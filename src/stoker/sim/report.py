"""What replays and recorded trainings found, as an HTML page of its own, or a picture.

The ``rows`` of replays are dictionaries, one for each replay: ``recipe``, ``cache``, ``hit_ratio``,
``byte_hit_ratio``, ``limit`` and ``below_limit`` (shares); further ones of :data:`_COLUMNS` are
shown where they are there and not 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.report import page, write_report
from stoker.epoch.stats import Stats
from stoker.errors import ConfigError
from stoker.jobs.metrics import Waits
from stoker.sim import limits
from stoker.sim.trace import EpochTrace, Trace
from stoker.types import Outcome

Row = Mapping[str, Any]

_COLUMNS = {
    "recipe": ("recipe", "text", "What runs; see stoker.recipes."),
    "hit_ratio": ("hits", "share", "Accesses served from a copy kept for this use."),
    "byte_hit_ratio": ("bytes", "share", "The same, weighted by size."),
    "substituted_ratio": ("substituted", "share", "Another sample was served."),
    "packaged_ratio": ("packaged", "share", "Came with a package."),
    "limit": ("limit", "share", "The most hits that any cache of the size could have."),
    "below_limit": ("below limit", "share", "How far hits are from it, in points."),
    "closed_form": ("theory", "share", "What a closed form says that the recipe hits."),
    "ess": ("ESS/N", "share", "Effective sample size of an epoch's visits / samples."),
    "coverage": ("coverage", "share", "Samples visited at all in an epoch."),
    "reads_per_distinct_sample": ("reads", "number", "Reads of the source per distinct sample."),
    "epoch_seconds": ("epoch s", "number", "Seconds of an epoch, in virtual time."),
    "stall_seconds": ("stall s", "number", "Of these, training waited."),
    "utilisation": ("busy", "share", "Share of the time in which training computed."),
}

_X_LABEL = "cache, % of the data set's bytes"
_MOST, _LRU = "most, once an epoch", "LRU in theory"
_LIMIT_STYLE: dict[str, dict[str, Any]] = {
    _MOST: {"color": "black", "linestyle": ":"},
    _LRU: {"color": "grey", "linestyle": (0, (1, 3))},
}
_KINDS = (
    ("Hits, by number", "hit_ratio", True),
    ("Hits, by bytes", "byte_hit_ratio", False),
)
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#666666",
)  # fmt: skip
"""Okabe and Ito's, which most people can tell apart, without the yellow and with a grey."""
_DASHES = ("", "7 3", "2 3")
_LIMITS = (("#000000", "1 4"), ("#888888", "1 6"))
_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 190, 34, 46
_ROW = 17  # height of a line of the legend


def html(
    rows: Sequence[Row],
    facts: Mapping[str, Any],
    sizes: NDArray[np.int64],
    whole: int | None = None,
) -> str:
    """Return a page with the curves and the tables; it needs nothing but itself.

    ``facts`` are told at its beginning, by name. ``sizes``: ``i64[N]``, bytes as they are cached,
    for the limit; ``whole``: the bytes that shares are of, None: of all these.
    """
    columns = [name for name in _COLUMNS if any(row.get(name) for row in rows)]
    parts = _charts(rows, sizes, whole)
    for share in sorted({row["cache"] for row in rows}):
        those = [row for row in rows if row["cache"] == share]
        parts += [f"<h2>A cache of {100 * share:g} % of the bytes</h2>"]
        parts += ['<div class="wide">', _table(those, columns), "</div>"]
    parts += ["<h2>What the columns are</h2><ul>"]
    parts += [f"<li><b>{_COLUMNS[name][0]}</b>: {_COLUMNS[name][2]}</li>" for name in columns]
    parts += ["</ul><p>Shares are in percent.</p>"]
    return page("What a cache of each size hits", facts, parts)


def write_html(
    path: str | os.PathLike[str],
    rows: Sequence[Row],
    facts: Mapping[str, Any],
    sizes: NDArray[np.int64],
    whole: int | None = None,
) -> None:
    """Write :func:`html` to a file; raises OSError."""
    Path(path).write_text(html(rows, facts, sizes, whole), encoding="utf-8")


def write_plot(
    path: str | os.PathLike[str],
    rows: Sequence[Row],
    facts: Mapping[str, Any],
    sizes: NDArray[np.int64],
    whole: int | None = None,
) -> None:
    """Write the curves as a picture, of the kind that the name ends in, by matplotlib.

    Raises :class:`~stoker.errors.ConfigError` if that is not installed or does not know the kind,
    and OSError.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'stoker[plot]'") from error
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for axes, (title, key, own) in zip(figure.subplots(1, 2), _KINDS, strict=True):
        lines = [*_lines(rows, key), *_limits(sizes, own, whole)]
        for number, line in enumerate(lines):
            percent = 100 * np.asarray(line.ys)
            style = _LIMIT_STYLE[line.name] if line.is_limit else _style(number)
            axes.plot(100 * np.asarray(line.xs), percent, label=line.name, **style)
        largest = max(float(row["cache"]) for row in rows)
        axes.set(title=title, xlabel=_X_LABEL, xlim=(0, 105 * largest), ylim=(0, None))
        axes.set_ylim(0, 105 * max(0.05, *(row[key] for row in rows)))
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(", ".join(f"{name} {value}" for name, value in facts.items()), fontsize=9)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise ConfigError(f"--plot {path!s}: {error}") from error


def write_trace_report(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write what ``trace`` tells of each epoch to an HTML page.

    Time and waits are those of the first rank, counts those of all. Raises
    :class:`~stoker.errors.ConfigError` for a damaged trace or one without an epoch, and OSError.
    """
    sizes, waits, epochs = trace.sizes, Waits(), []
    visited = np.zeros(len(sizes), np.bool_)
    for epoch in trace:
        epochs.append(stats_of(epoch, sizes))
        visited[epoch.asked] = True
        for seconds in epoch.stalls.tolist():
            waits.add(seconds)
    facts = {name: trace.about[name] for name in ("recipe", "num_samples", "seed")}
    facts |= {name: trace.run[name] for name in ("world_size", "batch_size", "num_workers")}
    write_report(path, facts, epochs, waits.counts, sizes[visited], int(trace.run["cache_bytes"]))


def stats_of(epoch: EpochTrace, sizes: NDArray[np.int64]) -> Stats:
    """Return the counts of an epoch over samples of ``sizes`` (``i64[N]``)."""
    of = {outcome: epoch.outcomes == outcome for outcome in Outcome}
    served = sizes[epoch.ids]
    times, stalls = epoch.times, epoch.stalls
    return Stats(
        accesses=len(epoch.ids),
        hits=int(of[Outcome.HIT].sum()),
        substituted=int(of[Outcome.SUBSTITUTED].sum()),
        fetched=int(of[Outcome.FETCHED].sum()),
        packaged=int(of[Outcome.PACKAGED].sum()),
        bytes_from_source=int(served[of[Outcome.FETCHED]].sum()),
        bytes_from_cache=int(served[~of[Outcome.FETCHED]].sum()),
        epoch_seconds=float(times[-1] - times[0] + stalls[0]) if len(times) else 0.0,
        stall_seconds=float(stalls.sum()),
    )


@dataclass(frozen=True)
class Line:
    """One curve; ``xs`` and ``ys`` are shares, 0 to 1, of one length."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    is_limit: bool = False
    """Whether it is drawn as a bound: thin, dotted, without points."""


def chart(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """Return an ``<svg>`` with axes from 0, a grid, the curves and their names."""
    top_x = _nice(max((max(line.xs) for line in lines if not line.is_limit), default=1.0))
    top_y = _nice(max((y for line in lines if not line.is_limit for y in line.ys), default=1.0))
    frame = _Frame(top_x, top_y)
    rows = max(_HEIGHT, _TOP + _ROW * (len(lines) + 1) + 10)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {rows}" role="img" aria-label="{escape(title, quote=True)}" '
        'xmlns="http://www.w3.org/2000/svg">',
        _text(_LEFT, 20, title, "start", "bold"),
        *_grid(frame),
        _text((_LEFT + frame.right) / 2, _HEIGHT - 8, x_label, "middle"),
        f'<g transform="rotate(-90 14 {(_TOP + frame.bottom) / 2})">',
        _text(14, (_TOP + frame.bottom) / 2, y_label, "middle"),
        "</g>",
    ]
    number = limits = 0
    for row, line in enumerate(lines):
        if line.is_limit:
            colour, dash = _LIMITS[limits % len(_LIMITS)]
            limits += 1
        else:
            colour = _COLOURS[number % len(_COLOURS)]
            dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
            number += 1
        parts += _curve(frame, line, colour, dash)
        y = _TOP + 8 + _ROW * row
        parts.append(_stroke(f"M{frame.right + 16} {y}h26", colour, dash))
        parts.append(_text(frame.right + 48, y + 4, line.name, "start"))
    return "\n".join([*parts, "</svg>"])


def _charts(rows: Sequence[Row], sizes: NDArray[np.int64], whole: int | None) -> list[str]:
    return [
        chart(title, _X_LABEL, "hits, %", [*_lines(rows, key), *_limits(sizes, by_number, whole)])
        for title, key, by_number in _KINDS
    ]


def _lines(rows: Sequence[Row], key: str) -> list[Line]:
    """Return a curve for each recipe; those that hit most come first, in all charts alike."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["recipe"]] = totals.get(row["recipe"], 0.0) + row["hit_ratio"]
    lines = []
    for name in sorted(totals, key=lambda name: -totals[name]):
        points = sorted((row["cache"], row[key]) for row in rows if row["recipe"] == name)
        lines.append(Line(name, [x for x, _ in points], [y for _, y in points]))
    return lines


def _limits(sizes: NDArray[np.int64], by_number: bool, whole: int | None) -> list[Line]:
    """Return the most that can be hit if each sample is visited once an epoch, and LRU's share."""
    shares = np.linspace(0, 1, 101)
    total = float(sizes.sum())
    held = np.minimum(1, shares * (total if whole is None else whole) / total)
    if by_number:
        most = [limits.smallest_first(sizes, share * total) for share in held.tolist()]
    else:
        most = limits.uniform(held).tolist()
    known = limits.lru_epochs(held)
    return [
        Line(_MOST, shares.tolist(), most, is_limit=True),
        Line(_LRU, shares.tolist(), known.tolist(), is_limit=True),
    ]


def _style(number: int) -> dict[str, Any]:
    return {
        "color": f"C{number % 10}",
        "linestyle": ("-", "--", "-.")[number // 10 % 3],
        "marker": "o",
        "markersize": 3.5,
        "linewidth": 1.3,
    }


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    ordered = sorted(rows, key=lambda row: -row["hit_ratio"])
    best = min((row["epoch_seconds"] for row in rows if row.get("epoch_seconds")), default=None)
    head = "".join(f"<th>{_COLUMNS[name][0]}</th>" for name in columns)
    lines = [f"<table><thead><tr>{head}</tr></thead><tbody>"]
    for row in ordered:
        cells = "".join(f"<td>{_cell(row.get(name), _COLUMNS[name][1])}</td>" for name in columns)
        is_best = best is not None and row.get("epoch_seconds") == best
        lines.append(f"<tr{' class=best' if is_best else ''}>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _cell(value: Any, kind: str) -> str:
    if value is None:
        return ""
    if kind == "text":
        return escape(str(value))
    return f"{100 * value:z.1f}" if kind == "share" else f"{value:.3g}"


class _Frame:
    """Where shares lie on the drawing."""

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def __init__(self, top_x: float, top_y: float) -> None:
        self.top_x, self.top_y = top_x, top_y

    def x(self, share: float) -> float:
        return _LEFT + (self.right - _LEFT) * share / self.top_x

    def y(self, share: float) -> float:
        return self.bottom - (self.bottom - _TOP) * share / self.top_y


def _grid(frame: _Frame) -> list[str]:
    parts = []
    for k in range(6):
        share_x, share_y = frame.top_x * k / 5, frame.top_y * k / 5
        x, y = frame.x(share_x), frame.y(share_y)
        parts.append(_stroke(f"M{x:.1f} {_TOP}V{frame.bottom}", "#dddddd", ""))
        parts.append(_stroke(f"M{_LEFT} {y:.1f}H{frame.right}", "#dddddd", ""))
        parts.append(_text(x, frame.bottom + 16, _percent(share_x), "middle"))
        parts.append(_text(_LEFT - 7, y + 4, _percent(share_y), "end"))
    return parts


def _curve(frame: _Frame, line: Line, colour: str, dash: str) -> list[str]:
    points = list(zip(line.xs, line.ys, strict=True))
    if line.is_limit:
        points = _clipped(points, frame)
    points_at = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points]
    parts = [_stroke("M" + "L".join(points_at), colour, dash, 1.6)] if points_at else []
    if not line.is_limit:
        for x, y in points:
            told = f"{line.name}: {_percent(y)} at {_percent(x)}"
            parts.append(
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.2" fill="{colour}">'
                f"<title>{escape(told)}</title></circle>"
            )
    return parts


def _clipped(points: list[tuple[float, float]], frame: _Frame) -> list[tuple[float, float]]:
    """Return the beginning of a curve that lies inside, and where it leaves."""
    inside: list[tuple[float, float]] = []
    for x, y in points:
        if x > frame.top_x or y > frame.top_y:
            if inside:
                (x0, y0) = inside[-1]
                part = min(
                    (frame.top_x - x0) / (x - x0) if x > frame.top_x else 1.0,
                    (frame.top_y - y0) / (y - y0) if y > frame.top_y else 1.0,
                )
                inside.append((x0 + part * (x - x0), y0 + part * (y - y0)))
            break
        inside.append((x, y))
    return inside


def _nice(largest: float) -> float:
    """Return the least round share that is not below ``largest``."""
    return next(top for top in (0.05, 0.1, 0.25, 0.5, 0.75, 1.0) if largest <= top or top == 1.0)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _stroke(path: str, colour: str, dash: str, width: float = 1.0) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _text(x: float, y: float, text: str, anchor: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="12">{escape(text)}</text>'
    )

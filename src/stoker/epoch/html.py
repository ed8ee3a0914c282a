"""The pieces that pages for people are made of: a page, tables and bars, with nothing to load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

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

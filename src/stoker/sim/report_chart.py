"""Curves of shares as inline SVG, by our own few lines: no library, no network, no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#666666",
)  # fmt: skip
"""Okabe and Ito's, which most people can tell apart, without the yellow and with a grey."""
_DASHES = ("", "7 3", "2 3")
_LIMITS = (("#000000", "1 4"), ("#888888", "1 6"))
_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 190, 34, 46
_ROW = 17  # height of a line of the legend


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
    places = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points]
    parts = [_stroke("M" + "L".join(places), colour, dash, 1.6)] if places else []
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

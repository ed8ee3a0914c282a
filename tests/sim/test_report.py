"""The report: well-formed, on its own, with every number where it belongs."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sim import limits
from stoker.sim.report import Line, chart, html, write_html, write_plot

SIZES = np.maximum(1, np.random.default_rng(0).lognormal(3, 1, 500)).astype(np.int64)
SVG = "{http://www.w3.org/2000/svg}"


def row(recipe, cache, hits, **more):
    limit = limits.smallest_first(SIZES, cache * float(SIZES.sum()))
    return {
        "recipe": recipe,
        "cache": cache,
        "hit_ratio": hits,
        "byte_hit_ratio": 0.8 * hits,
        "limit": limit,
        "below_limit": limit - hits,
        "closed_form": None,
        **more,
    }


ROWS = [
    row(name, cache, cache * part)
    for name, part in [("lru", 0.2), ("minio", 0.9), ("a <b> & c", 0.5)]
    for cache in (0.1, 0.2, 0.4)
]


def drawings(page):
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def points_of(drawing):
    """Return {recipe: [(x, y, title)]} of the points."""
    found = {}
    for circle in drawing.iter(f"{SVG}circle"):
        title = circle.find(f"{SVG}title").text
        name = title.rpartition(":")[0]
        at = float(circle.get("cx")), float(circle.get("cy")), circle.get("fill")
        found.setdefault(name, []).append((*at, title))
    return found


def test_every_number_is_in_the_tables_and_nothing_comes_from_elsewhere():
    page = html(ROWS, {"samples": 500, "trace": "<t>"}, SIZES)
    for one in ROWS:
        for key in ("hit_ratio", "byte_hit_ratio", "limit", "below_limit"):
            assert f"<td>{100 * one[key]:.1f}</td>" in page
    assert "a &lt;b&gt; &amp; c" in page
    assert "a <b>" not in page
    assert "samples 500, trace &lt;t&gt;" in page
    assert "theory" not in page.partition("<table>")[2].partition("</table>")[0]
    for outside in ("<script", "src=", "href=", "@import", "url("):
        assert outside not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_tags_are_closed():
    opened = []

    class Check(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "path"):
                opened.append(tag)

        def handle_startendtag(self, tag, attributes):
            pass

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Check().feed(html(ROWS, {}, SIZES))
    assert not opened


def test_points_lie_where_their_numbers_say_and_keep_their_colours():
    by_number, by_bytes = drawings(html(ROWS, {}, SIZES))
    points = points_of(by_number)
    assert set(points) == {"lru", "minio", "a <b> & c"}
    x, y = zip(*[(p[0], p[1]) for p in points["minio"]], strict=True)
    assert x[1] - x[0] == pytest.approx((x[2] - x[1]) / 2, abs=0.2)
    assert y[0] - y[1] == pytest.approx((y[1] - y[2]) / 2, abs=0.2)  # upwards
    assert [p[3] for p in points["lru"]] == ["lru: 2% at 10%", "lru: 4% at 20%", "lru: 8% at 40%"]
    other = points_of(by_bytes)
    colours = {name: {p[2] for p in found} for name, found in points.items()}
    assert colours == {name: {p[2] for p in found} for name, found in other.items()}
    assert len(set.union(*colours.values())) == 3


def test_a_limit_ends_at_the_frame():
    line = Line("most", [0.0, 0.5, 1.0], [0.0, 1.0, 1.0], is_limit=True)
    drawing = ET.fromstring(chart("t", "x", "y", [Line("a", [0.1], [0.2]), line]))
    path = next(p for p in drawing.iter(f"{SVG}path") if p.get("stroke-dasharray") == "1 4")
    numbers = [tuple(map(float, p.split())) for p in path.get("d")[1:].split("L")]
    grid = [p.get("d") for p in drawing.iter(f"{SVG}path") if p.get("stroke") == "#dddddd"]
    right = max(float(d[1:].split()[0]) for d in grid)
    assert max(x for x, _ in numbers) == pytest.approx(right, abs=0.1)


def test_times_are_shown_where_there_are_any_and_the_shortest_stands_out():
    rows = [
        row("lru", 0.2, 0.1, epoch_seconds=12.34, stall_seconds=5.0, utilisation=0.6),
        row("minio", 0.2, 0.2, epoch_seconds=10.0, stall_seconds=2.0, utilisation=0.8),
    ]
    page = html(rows, {}, SIZES)
    assert "<td>12.3</td>" in page
    assert "<tr class=best><td>minio</td>" in page
    assert "epoch s" not in html(ROWS, {}, SIZES)


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    write_html(tmp_path / "r.html", ROWS, {}, SIZES)
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == html(ROWS, {}, SIZES)
    write_plot(tmp_path / "p.png", ROWS, {"samples": 500}, SIZES)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    write_plot(tmp_path / "p.svg", ROWS, {"samples": 500}, SIZES)
    assert "<svg" in (tmp_path / "p.svg").read_text()
    with pytest.raises(ConfigError, match="doc"):
        write_plot(tmp_path / "p.doc", ROWS, {}, SIZES)

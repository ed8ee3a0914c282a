"""What stands between the markers of a page of results is what the JSON beside it says."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGES = sorted((FOLDER / "results").glob("*.md"))
BY_HAND = {
    "accelerator",
    "feeding",
    "hit-path",
    "importance",
    "nodes",
    "pool",
    "s3",
    "tiering",
    "time-to-accuracy",
    "trust",
}
"""Pages recorded before benchmarks wrote them: each leaves this list when it is measured again."""

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_made_of_the_json_beside_it(page: Path) -> None:
    import harness
    import pages
    from trial.page import made_part

    found = pages.parts(page)
    assert bool(found) == (page.stem not in BY_HAND)
    assert len(re.findall(r"<!-- ", page.read_text())) == 2 * len(found)
    for name, text in found.items():
        document = json.loads((page.parent / f"{name}.json").read_text())
        made = made_part(document) if name == "trial" else harness.text_of(document)
        assert text == made.strip(), f"publish {name} again: its benchmark has --publish benchmarks"


def test_all_json_is_shown_once() -> None:
    import pages

    shown = [name for page in PAGES for name in pages.parts(page)]
    assert sorted(shown) == sorted(path.stem for path in (FOLDER / "results").glob("*.json"))


def test_a_part_is_replaced_and_what_is_around_it_stays(tmp_path: Path) -> None:
    import pages

    pages.put(tmp_path, "frontier", "frontier", "old")
    page = tmp_path / "foresight.md"
    page.write_text(f"before\n\n{page.read_text()}\nafter\n")
    pages.put(tmp_path, "curves", "curves", "other")
    pages.put(tmp_path, "frontier", "frontier", "new\n\nlines\n\n")
    assert pages.parts(page) == {"frontier": "new\n\nlines", "curves": "other"}
    text = page.read_text()
    assert "old" not in text and text.startswith("before\n") and "\nafter\n" in text


def test_published_reports_are_told_the_same_from_their_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import harness
    import numpy as np
    import pages

    monkeypatch.setattr("sys.argv", ["x/simulate.py", "--seeds", "3", "--publish", str(tmp_path)])
    report = harness.Report("Speed")
    report.row(recipe="lru", seconds=1 / 3, hits=np.int64(3))
    report.target("seconds", 1 / 3, 0.5)
    report.remarks = ["Alone."]
    harness.show(
        argparse.Namespace(json=False, smoke=False, publish=tmp_path), report, part="speed"
    )
    (text,) = pages.parts(tmp_path / "results" / "simulator.md").values()
    told = json.loads((tmp_path / "results" / "simulate-speed.json").read_text())
    assert told["command"] == "python benchmarks/simulate.py --seeds 3"
    assert told["reports"][0]["rows"] == [{"recipe": "lru", "seconds": 1 / 3, "hits": 3}]
    assert text == harness.text_of(told).strip()
    assert re.search(r"recorded in [0-9a-f]{7} \(20\d\d-\d\d-\d\d\)\.$", text, re.M)
    without_origin = [line for line in text.splitlines() if not line.startswith("`")]
    assert without_origin == [
        line for line in capsys.readouterr().out.strip().splitlines() if not line.startswith("`")
    ]


def test_a_smoke_test_publishes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import harness

    args = argparse.Namespace(json=True, smoke=True, publish=tmp_path)
    harness.show(args, harness.Report("Speed", smoke=True))
    assert json.loads(capsys.readouterr().out)["title"] == "Speed"
    assert not [*tmp_path.iterdir()]


def test_the_list_says_how_long_published_runs_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import run_all

    monkeypatch.setattr("sys.argv", ["run_all.py", "--list"])
    assert run_all.main() == 0
    told = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert told.keys() == {*run_all.BENCHMARKS, *run_all.HOURS}
    frontier = json.loads((FOLDER / "results" / "frontier.json").read_text())
    assert told["frontier"] == f"{frontier['seconds']} s"
    assert told["fair_trial"] == "hours" and told["block"].endswith("s for plans, hours")


def test_every_benchmark_has_a_page() -> None:
    import pages
    import run_all

    for name in (*run_all.BENCHMARKS, *run_all.HOURS, *run_all.ON_A_DEVICE):
        assert pages.page_of(name, name)

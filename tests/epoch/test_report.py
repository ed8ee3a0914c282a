"""The page of a training: whole, self-contained, and with the figures of its epochs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from support.parts import number_of, numbers

from stoker.epoch.report import bars, most_hits, page, table, write_report
from stoker.epoch.stats import Stats
from stoker.errors import ConfigError
from stoker.feed import Feed
from stoker.jobs.metrics import Waits
from stoker.pytorch import Loader, SampleDataset
from stoker.sim.result import EpochResult, SimResult

EPOCHS = [
    Stats(accesses=100, fetched=100, bytes_from_source=1000, epoch_seconds=2.0, stall_seconds=1.0),
    Stats(accesses=100, hits=25, fetched=75, epoch_seconds=1.0, stall_seconds=0.5),
]


class Checked(HTMLParser):
    """Fails for tags that do not match, and for what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {name for name, _ in attrs} & {"src", "href"}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> str:
    parser = Checked()
    parser.feed(text)
    assert parser.open == []
    return text


def test_a_report_has_the_figures_of_each_epoch(tmp_path: Path) -> None:
    waits = Waits()
    waits.add(0.0015)
    sizes = np.array([10, 10, 20, 40], np.int64)
    write_report(tmp_path / "run.html", {"recipe": "<lru>"}, EPOCHS, waits.counts, sizes, 25)
    text = checked((tmp_path / "run.html").read_text())
    assert "&lt;lru&gt;" in text
    assert "<td>25.0%</td><td>50.0%</td>" in text, "hits beside the most that are possible"
    assert "1 batches; p50" in text
    assert "31.2%" in text, "of 80 bytes the cache has 25"
    assert EPOCHS[-1].verdict.split(":")[0] in text


@pytest.mark.parametrize(
    ("cache_bytes", "share"), [(0, 0.0), (9, 0.0), (20, 0.5), (40, 0.75), (1000, 1.0)]
)
def test_at_most_the_smallest_that_fit_can_hit(cache_bytes: int, share: float) -> None:
    assert most_hits(np.array([20, 10, 40, 10], np.int64), cache_bytes) == share


def test_pieces_escape_what_they_are_given_and_stand_empty() -> None:
    text = page("<a>", {"b": "<c>"}, [table(("<d>",), [("<e>",)]), bars("<f>", [], [], [])])
    assert not re.search("<[acdef]>", checked(text))
    checked(bars("all zero", ["1", "2"], [0.0, 0.0], ["a", "<b>"], ("limit", 0.0)))


def test_a_report_without_an_epoch_is_refused(tmp_path: Path) -> None:
    with (
        Loader(SampleDataset(numbers(50), number_of), batch_size=10, recipe="lru") as loader,
        pytest.raises(ConfigError, match="no epoch has ended"),
    ):
        loader.report(tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()


def trainings() -> Iterator[Loader | Feed]:
    yield Loader(SampleDataset(numbers(50), number_of), batch_size=10, recipe="lru")
    yield Feed(numbers(50), batch_size=10, recipe="lru")


def test_a_loader_and_a_feed_report_their_epochs(tmp_path: Path) -> None:
    for number, training in enumerate(trainings()):
        with training:
            assert "no epoch has ended yet" in training._repr_html_()
            for _ in range(3):
                list(training)
            assert checked(training._repr_html_()).count("<tr><td>") == 3
            training.report(tmp_path / f"{number}.html")
        text = checked((tmp_path / f"{number}.html").read_text())
        assert text.count("<tr><td>") == 3
        assert "15 batches; p50" in text


def test_stats_and_results_show_as_tables_in_notebooks() -> None:
    shown = checked(EPOCHS[1]._repr_html_())
    assert "25.0%" in shown
    counts = {"substituted": 0, "packaged": 0, "package_reads": 0}
    epoch = EpochResult(
        0, accesses=4, hits=1, fetched=3, hit_bytes=1, served_bytes=4, ess=1.0, coverage=1.0,
        time=None, **counts,
    )  # fmt: skip
    assert "<td>25.0%</td>" in checked(SimResult("lru", 4, 0.25, [epoch])._repr_html_())

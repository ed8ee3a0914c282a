"""The live page: the figures of `stoker top`, in a real browser, of real jobs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.browser import browser, needs_browser

from stoker.cli.root import root
from stoker.cli.view import Frames, History, JobView, view_of
from stoker.errors import StokerError
from stoker.jobs.metrics import PUBLISHED, Waits

CLI = "from stoker.cli import main; main()"
EVIL = "<script>document.title='owned'</script>"
TRAINING = """
import sys, threading
import stoker
from stoker.jobs import Sharing
from stoker.source import MemorySource
from stoker.testing import SlowSource

def train(name, latency, size):
    source = SlowSource(MemorySource([bytes(size)] * 400), latency=latency)
    cache = stoker.Cache("40%", sharing=Sharing(name))
    with stoker.Feed(source, 10, cache=cache, recipe="minio") as feed:
        while True:
            list(feed)

for number, name in enumerate(sys.argv[1:]):
    arguments = name, 0.002 * (number + 1), 1000 + number
    threading.Thread(target=train, args=arguments, daemon=True).start()
sys.stdin.read()
"""


@contextmanager
def training(*names: str) -> Iterator[None]:
    command = [sys.executable, "-c", TRAINING, *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def service(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real service, and where its page is."""
    command = [sys.executable, "-c", CLI, "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            yield (
                process,
                next(found[1] for line in lines if (found := re.match(r"page: (\S+)", line))),
            )
        finally:
            process.kill()


def job(**more: Any) -> dict[str, Any]:
    counts = dict.fromkeys(PUBLISHED, 0.0) | {"accesses": 10.0, "hits": 6.0, "epoch_seconds": 2.0}
    counts |= {"disk_hits": 2.0, "stall_seconds": 1.0, "workers": 1.0}
    return {"name": "a", "pid": 7, "processes": 1, "counts": counts, "waits": Waits().counts} | more


def test_a_frame_has_the_figures_of_top() -> None:
    cache = {"key": "k", "description": "Data", "jobs": [job(name=EVIL)]}
    frame = json.loads(Frames(lambda: [cache])())
    view: JobView = view_of("Data", job(name=EVIL))
    (shown,) = frame["jobs"]
    assert [column["title"] for column in frame["columns"]][:3] == ["job", "samples/s", "waits"]
    assert shown["cells"][:4] == [EVIL, "5", "50%", "60.0%"]
    assert shown["kinds"]["memory"] == view.from_memory == pytest.approx(0.4)
    assert sum(shown["stages"].values()) == pytest.approx(1)
    assert shown["facts"]["if data were free"] == "2.00 times as fast (an estimate)"
    assert shown["verdict"] == view.verdict


@pytest.mark.parametrize("bad", [{}, job(counts={}), job(waits=["x"]), job(processes=0)])
def test_what_is_no_job_is_trouble_and_no_frame(bad: dict[str, Any]) -> None:
    with pytest.raises(StokerError, match="no count"):
        Frames(lambda: [{"key": "k", "description": "", "jobs": [bad]}])()


@pytest.mark.parametrize("where", ["70000", "/nowhere/at/all/web.sock"])
def test_where_no_page_can_be_is_refused(where: str) -> None:
    result = CliRunner().invoke(root, ["serve", "--web", where])
    assert result.exit_code == 1
    assert where in result.output


def test_a_service_that_ended_leaves_the_handlers_of_signals_as_they_were() -> None:
    """What came after it in the same process could not be ended by SIGTERM, nor could its forks."""
    signals = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in signals]
    assert CliRunner().invoke(root, ["serve", "--web", "70000"]).exit_code == 1
    assert [signal.getsignal(number) for number in signals] == before


@needs_browser
def test_a_browser_shows_jobs_live_and_runs_nothing_of_theirs(tmp_path: Path) -> None:
    with (
        service("--web", "0") as (process, url),
        training("plain", EVIL),
        browser(tmp_path) as page,
    ):
        page.open(url)
        page.until("document.querySelectorAll('tbody').length === 2")
        names = page.value("[...document.querySelectorAll('td.name')].map(e => e.textContent)")
        assert set(names) == {"plain", EVIL}
        assert page.value("document.title") == "2 running · Stoker"
        assert page.value("document.scripts.length") == 1

        page.value("head.cells[0].querySelector('button').click()")
        first = "document.querySelector('td.name').textContent"
        assert page.value(first) == EVIL, "sorted by name"
        page.value("head.cells[0].querySelector('button').click()")
        assert page.value(first) == "plain"
        page.value("document.querySelector('td.name button').click()")
        assert "times as fast" in page.value("document.querySelector('dl').textContent")

        looks = page.value("past.values().next().value.length")
        page.until(f"past.values().next().value.length > {looks}")
        assert page.value("document.querySelectorAll('dl').length") == 1, "it stays open"
        assert page.said == [], "what its policy forbids is an error"

        process.send_signal(signal.SIGTERM)
        page.until("/connecting again|not connected/.test(state.textContent)")
        assert process.wait(60) == 0


@needs_browser
def test_it_fits_a_phone_and_the_dark(tmp_path: Path) -> None:
    with service("--web", "0") as (_, url), training("one"), browser(tmp_path) as page:
        colours = set()
        for dark in (False, True):
            page.open(url, width=390, dark=dark)
            page.until("document.querySelectorAll('tbody').length === 1")
            assert page.value("document.documentElement.scrollWidth") <= 390
            colours.add(page.value("getComputedStyle(document.body).backgroundColor"))
            assert page.screenshot().startswith(b"\x89PNG")
        assert len(colours) == 2
        assert page.said == []


@needs_browser
def test_without_a_job_it_says_so_and_without_the_token_nothing(tmp_path: Path) -> None:
    with service("--web", "0") as (_, url), browser(tmp_path) as page:
        page.open(url)
        page.until("document.getElementById('none')?.hidden === false")
        page.until("state.textContent === 'live'")
        page.open(url.partition("?")[0])
        page.until("document.body.textContent.includes('403')")


def test_a_job_that_was_not_looked_at_for_long_is_shown_as_of_its_beginning() -> None:
    history, cache = History(), {"key": "k", "description": "", "jobs": [job()]}
    history.add([cache], 0.0)
    [view] = history.add([cache], 3600.0)
    assert (view.bound, view.rate) != ("idle", 0.0)
    assert view.rate == 5

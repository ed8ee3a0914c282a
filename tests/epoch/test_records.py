"""The books of a rank, those of the sources of a mixture, and the bar, on a terminal only."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.parts import numbers

import stoker
from stoker import Cache
from stoker.epoch import records
from stoker.epoch.records import SourceBooks, Visits
from stoker.errors import ConfigError
from stoker.feed import Feed
from stoker.sampler import Mixture
from stoker.source import MemorySource
from stoker.testing import SlowSource
from stoker.types import Outcome

MIXTURE = Mixture(("a", "b"), (10, 5), {"a": 1, "b": 1}, 20)
SIZES = np.arange(100, 115)
NONE = np.empty(0, np.uint32)

PROGRAM = """
import time
import stoker
from stoker.source import MemorySource

source = MemorySource([bytes([n]) * 100 for n in range(60)])
with stoker.Feed(source, 10, epochs=2, progress=True) as feed:
    for _ in range(2):
        for number, batch in enumerate(feed):
            time.sleep(0.03)  # a step
    next(iter(feed))  # and one epoch is left early
print("over")
"""


def test_coverage_and_effective_sample_size() -> None:
    visits = Visits(10)
    assert (visits.coverage(10), visits.ess(10)) == (0.0, 0.0)
    visits.add(np.array([1, 2, 3, 1], np.uint32))
    assert visits.coverage(4) == 0.75
    assert visits.ess(10) == (4**2 / (4 + 1 + 1)) / 10
    visits.begin_epoch()
    visits.add(np.arange(10, dtype=np.uint32))
    assert (visits.coverage(10), visits.ess(10)) == (1.0, 1.0)


def three_epochs(caplog: pytest.LogCaptureFixture, **options: Any) -> list[logging.LogRecord]:
    """What a training says that reads samples slowly."""
    slow = SlowSource(numbers(20), latency=0.005)
    cache = Cache("20%", prefetch=0)
    caplog.set_level(logging.INFO, "stoker")
    with Feed(slow, 2, cache=cache, decode_threads=0, **options) as feed:
        for _ in range(3):
            list(feed)
    return [each for each in caplog.records if "after two epochs" in each.message]


def test_a_training_says_once_what_limits_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_SHORT", 0.0)
    [said] = three_epochs(caplog)
    assert said.levelno == logging.WARNING
    assert re.search(r"is bound by storage: training waits \d+% of the time", said.message)
    caplog.clear()
    assert not three_epochs(caplog, rank=1, world_size=2), "rank 0 says it"


def test_a_training_of_short_epochs_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert not three_epochs(caplog)


def test_the_wait_for_the_first_batch_of_each_epoch_is_counted() -> None:
    with Feed(SlowSource(numbers(20), latency=0.01), 10, cache=0, decode_threads=0) as feed:
        for _ in range(2):
            for _ in feed:
                pass
        assert 0.02 <= feed.stats.start_seconds < feed.stats.epoch_seconds


def test_counts_and_epochs_of_the_sources_of_a_mixture() -> None:
    books = SourceBooks(MIXTURE, 0, SIZES)
    ids = np.array([0, 9, 10, 10, 14], np.uint32)
    hit, fetched = Outcome.HIT, Outcome.FETCHED
    books.add(ids, np.array([hit, fetched, fetched, hit, Outcome.SUBSTITUTED], np.int8))
    stats = books.stats(2, NONE)
    a, b = stats["a"], stats["b"]
    assert (a.samples, a.accesses, a.hits, a.bytes, a.bytes_fetched) == (10, 2, 1, 209, 109)
    assert (b.samples, b.accesses, b.hits, b.bytes, b.bytes_fetched) == (5, 3, 1, 334, 110)
    assert (a.epochs, b.epochs) == (2, 4)
    assert a.hit_ratio == 0.5
    assert books.stats(1, np.array([1, 2, 3, 12], np.uint32))["a"].epochs == 1.3
    assert SourceBooks(MIXTURE, 0, SIZES).stats(0, NONE)["a"].hit_ratio == 0


def test_counts_of_sources_continue_from_a_state() -> None:
    books, resumed = SourceBooks(MIXTURE, 0, SIZES), SourceBooks(MIXTURE, 0, SIZES)
    ids, outcomes = np.array([3, 12], np.uint32), np.array([Outcome.HIT] * 2, np.int8)
    books.add(ids, outcomes)
    resumed.add(ids[:1], outcomes[:1])
    resumed.restore(books.state())
    assert resumed.stats(0, NONE) == books.stats(0, NONE)
    resumed.add(ids, outcomes)
    assert resumed.stats(0, NONE)["b"].accesses == 2
    resumed.restore({})
    assert resumed.stats(0, NONE)["a"].accesses == 0


def run(folder: Path, stderr: int) -> str:
    script = folder / "script.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_terminal_sees_each_epoch_to_its_end(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    assert run(tmp_path, theirs) == "over\n"
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end is closed, and everything is read
            break
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    for told in ("epoch 1", "epoch 2", "6/6", "samples/s, waits"):
        assert told in text, text
    assert "\x1b[?25h" in shown.decode(), "the cursor is shown again"


def test_a_log_file_sees_nothing(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        assert run(tmp_path, log.fileno()) == "over\n"
        log.seek(0)
        assert log.read() == ""


def test_without_rich_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ConfigError, match=r"pip install 'stoker\[tui\]'"):
        stoker.Feed(MemorySource([b"x"]), 1, progress=True)

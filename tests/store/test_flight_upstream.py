"""What is counted of reads that overlap."""

from __future__ import annotations

import numpy as np
import pytest
from support.doubles import CountingSource

from stoker.store.flight import Meter, Upstream


def test_time_counts_once_however_many_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    totals = np.zeros(3)
    meter = Meter(totals)
    first, second = meter.reading(10), meter.reading(5)
    first.__enter__()
    now[0] = 1.0
    second.__enter__()
    now[0] = 3.0
    first.__exit__(None, None, None)
    assert totals.tolist() == [10, 3.0, 5.0], "what is still under way counts as far as it has come"
    now[0] = 4.0
    second.__exit__(None, None, None)
    now[0] = 9.0
    with meter.reading(1):
        now[0] = 9.5
    assert totals.tolist() == [16, 4.5, 6.5]


def test_a_read_that_fails_is_counted_and_ends() -> None:
    totals = np.zeros(3)
    meter = Meter(totals)
    with pytest.raises(KeyboardInterrupt), meter.reading(3):
        raise KeyboardInterrupt
    with meter.reading(1):
        pass
    assert totals[0] == 4


def test_reads_are_told_to_the_meter() -> None:
    totals = np.zeros(3)
    brought = Upstream(CountingSource()).read(np.array([1, 2], np.uint32), meter=Meter(totals))
    assert totals[0] == 2
    assert totals[1] == pytest.approx(brought.source_seconds, abs=0.01)

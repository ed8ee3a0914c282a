"""The prefetch process, between two looks at what workers did."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stoker.prefetch.process import Pauses


def after(*moves: float, until: float) -> float:
    """The pause at ``until``, after the window moved at each of ``moves``."""
    pauses = Pauses()
    for at in moves:
        pauses.looked(True, at)
    pauses.looked(False, until)
    return pauses.seconds


def test_a_window_that_moves_fast_is_looked_at_often() -> None:
    assert after(0.0, 0.001, 0.002, until=0.0025) == pytest.approx(0.0005)
    assert after(0.0, 0.08, 0.16, until=0.17) == pytest.approx(0.01)


def test_a_window_that_moves_seldom_costs_no_processor() -> None:
    assert after(0.0, 2.0, until=2.1) == pytest.approx(0.02)
    assert after(0.0, 0.001, until=5.0) == pytest.approx(0.02)
    assert after(until=1.0) == pytest.approx(0.02)


def test_reads_that_the_window_does_not_hold_back_are_not_looked_for() -> None:
    pauses = Pauses()
    for at in (0.0, 0.001, 0.002):
        pauses.looked(True, at, is_held_back=True)
    assert pauses.seconds == pytest.approx(0.02)
    pauses.looked(False, 0.0025)
    assert pauses.seconds == pytest.approx(0.0005)


def test_it_starts_with_little() -> None:
    """A first epoch goes on without it meanwhile."""
    program = "import sys, stoker.prefetch.process; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = said.stdout.split()
    assert "stoker.prefetch.process" in loaded, said.stderr
    unused = {"asyncio", "obstore", "ssl", "stoker.recipes", "torch"}
    assert not unused.intersection(loaded)

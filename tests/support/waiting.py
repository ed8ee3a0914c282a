"""Waiting for conditions, in place of sleeping for as long as they usually take."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


def await_true(test: Callable[[], object], patience: float = 60.0) -> bool:
    """Whether ``test()`` becomes true within ``patience`` seconds."""
    end = time.monotonic() + patience
    while not test():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return when ``condition()`` is true; fail if that takes longer than ``seconds``."""
    assert await_true(condition, seconds), f"still not true after {seconds:.0f} s"


def train_step(seconds: float) -> None:
    """Take so long: what a program of the user does between two calls of ours."""
    time.sleep(seconds)


def some_time(least: float, most: float) -> None:
    """Let other processes get to wherever they get to, for that many seconds."""
    time.sleep(random.uniform(least, most))

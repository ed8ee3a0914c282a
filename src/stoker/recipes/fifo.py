"""FIFO: the sample that came first leaves first."""

from __future__ import annotations

from stoker.policy.fifo import FIFO
from stoker.recipes.base import Recipe


def fifo() -> Recipe:
    """Return uniform sampling over a first-in, first-out cache.

    The cheapest order there is: a hit changes nothing. A baseline, and the base of SIEVE and
    S3-FIFO. Source: the textbook policy.
    """
    return Recipe("fifo", "uniform; first in, first out", FIFO())

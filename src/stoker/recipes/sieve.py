"""SIEVE: first in, first out, except for what was used meanwhile."""

from __future__ import annotations

from stoker.policy.sieve import Sieve
from stoker.recipes.base import Recipe


def sieve() -> Recipe:
    """Return uniform sampling over a SIEVE cache.

    A hand sweeps the insertion order, spares samples visited since its last pass and evicts
    the first that was not. Strong on web-like skew; with shuffled epochs there is little to
    spare. Source: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.
    """
    return Recipe("sieve", "uniform; a sweeping hand spares the visited", Sieve())

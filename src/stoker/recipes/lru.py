"""LRU: the least recently used sample leaves."""

from __future__ import annotations

import math

from stoker.policy.lru import LRU
from stoker.recipes.base import Recipe


def lru() -> Recipe:
    """Return uniform sampling over an LRU cache, the usual default and the baseline to beat.

    With each sample visited once an epoch, the one that was used longest ago is the one due
    soonest, and LRU throws away just that. Use it to compare with, or where accesses repeat
    within a short time. Source: the common default of operating systems and caches; its
    hit ratio under shuffled epochs as in iCache (HPCA 2023), figure 2.
    """
    return Recipe("lru", "uniform; least recently used leaves", LRU(), limit=hit_ratio)


def hit_ratio(cache_fraction: float) -> float:
    """Return LRU's hit ratio when each epoch is a fresh shuffle: c + (1 - c) ln(1 - c).

    A sample visited at time t of one epoch and u of the next hits if fewer than cN distinct
    others came between: (1 - t) + u - (1 - t) u < c, with t and u uniform.
    """
    if cache_fraction >= 1:
        return 1.0
    return cache_fraction + (1 - cache_fraction) * math.log1p(-cache_fraction)

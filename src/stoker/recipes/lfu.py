"""LFU: the least often used sample leaves."""

from __future__ import annotations

from stoker.policy.lfu import LFU
from stoker.recipes.base import Recipe


def lfu() -> Recipe:
    """Return uniform sampling over an LFU cache; among equals the least recently used leaves.

    Shuffled epochs give every sample the same count, so it can only tell who has been in the
    cache for long. Of use when the sampler favours some samples. Source: the textbook policy;
    a baseline in SHADE (FAST 2023) and iCache (HPCA 2023).
    """
    return Recipe("lfu", "uniform; least often used leaves", LFU())

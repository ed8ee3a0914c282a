"""iLFU: easy samples are left out of some epochs; the least used sample leaves the cache."""

from __future__ import annotations

from stoker.policy.lfu import LFU
from stoker.recipes.base import Recipe
from stoker.recipes.part import part
from stoker.sampler.selective import SelectiveSampler


def ilfu(beta: float = 0.33, warm_up: int = 5, full_every: int = 3) -> Recipe:
    """Return iCache's sampling over an LFU cache, the baseline "iLFU" of its paper.

    Hard samples are visited more often, so counting accesses finds them, but late: shows what a
    cache gains by knowing the scores. Parameters as in :func:`icache`. Source: iCache (Chen et
    al., HPCA 2023), section 5.
    """
    return Recipe(
        "ilfu",
        "easy samples are left out at times; least frequently used leaves",
        policy=LFU(),
        sampler=part(SelectiveSampler, beta=beta, warm_up=warm_up, full_every=full_every),
    )

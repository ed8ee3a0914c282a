"""Base: every sample is fetched, the easy ones are not learned from."""

from __future__ import annotations

from stoker.importance.backward import SelectiveBackward
from stoker.policy.lru import LRU
from stoker.recipes.base import Recipe
from stoker.recipes.lru import hit_ratio
from stoker.recipes.part import part


def base(beta: float = 0.33, history: int = 1024) -> Recipe:
    """Return computing-oriented importance sampling (CIS), iCache's baseline "Base".

    Uniform epochs over an LRU cache; of each batch, only samples kept with probability
    percentile(loss)^``beta`` enter the gradient (``loader.weights`` is 0 for the others), the
    percentile taken over the last ``history`` losses. It saves computing and no I/O, and so shows
    what is left to gain by choosing before fetching. Source: Jiang et al., "Accelerating Deep
    Learning by Focusing on the Biggest Losers", 2019; its name and beta from iCache (HPCA 2023).
    """
    return Recipe(
        "base",
        "uniform, learns from hard samples; least recently used leaves",
        policy=LRU(),
        backward=part(SelectiveBackward, beta=beta, history=history),
        limit=hit_ratio,
    )

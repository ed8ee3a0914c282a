"""SHADE: ranks within the batch, repeated samples, and a cache that keeps the important ones."""

from __future__ import annotations

from typing import get_args

from stoker.importance.baselines import InBatchRank
from stoker.policy.score import Score
from stoker.recipes.base import Recipe, Same, choose, part
from stoker.sampler.pads import Order, PadsSampler


def shade(
    b0: float = 10.0,
    repetition: float | None = None,
    important: float = 0.2,
    low: float = 1.0,
    high: float = 3.0,
    step: float = 0.5,
    window: int = 3,
    steep: float = 0.2,
    order: Order = "spread",
    frequency: bool = False,
    smoothing: float = 0.0,
) -> Recipe:
    """Return SHADE: importance decides what is drawn, how often, and what is cached.

    - A sample scores the logarithm of its rank by loss within its batch, plus ``b0``.
    - Epochs are drawn with replacement by score (PADS). A repetition factor between ``low`` and
      ``high`` multiplies the share of the ``important`` samples; it grows by ``step`` while the
      mean of the last ``window`` changes of accuracy is positive and falls otherwise, or when the
      loss lost more than the share ``steep`` of itself in an epoch. It needs
      ``loader.end_epoch(accuracy=...)`` and stays at ``low`` without.
    - The cache (APP) admits what has been seen before and scores no less than its lowest sample.
      With ``frequency`` its entries are the paper's <importance, frequency>, so that of equal
      scores the sample accessed less leaves first; else ties fall at random.

    The authors' public code repeats by a fixed factor what lies in its cache, and its published
    hits come from that: ``repetition=3`` with ``important`` set to the cache's share, and without
    what moves the factor. It also emits all of these before all others, ``order="hits_first"``
    (``"spread"`` has repeats evenly spaced, which is ours), and adds ``smoothing``, 0.01 there, to
    scores: see :class:`~stoker.sampler.pads.PadsSampler`. Draws are not reweighted, as in the
    paper; the default of ``b0`` is the code's. Source: Khan et al., "SHADE: Enable Fundamental
    Cacheability for Distributed Deep Learning Training", FAST 2023.
    """
    choose("order", order, dict.fromkeys(get_args(Order)))
    return Recipe(
        "shade",
        "important samples repeat; evicts the least important",
        scorer=Same(InBatchRank(b0)),
        sampler=part(
            PadsSampler,
            repetition=repetition,
            important=important,
            low=low,
            high=high,
            step=step,
            window=window,
            steep=steep,
            order=order,
            smoothing=smoothing,
        ),
        policy=Score(frequency=frequency),
    )

"""InfoBatch: half of the easy samples are left out, and the others count for them."""

from __future__ import annotations

from stoker.policy.score import Score
from stoker.recipes.base import Recipe
from stoker.recipes.part import part
from stoker.sampler.infobatch import InfoBatchSampler


def infobatch(prune: float = 0.5, delta: float = 0.875, easiest: float | None = None) -> Recipe:
    """Return InfoBatch's unbiased pruning over a cache that keeps hard samples.

    A share ``prune`` of the samples with a loss below the mean is left out of each epoch, at
    random; those that stay weigh 1/(1 - prune) in ``loader.weights``. The last 1 - ``delta`` of
    the training is full and unweighted, so the Loader must be given ``epochs``. ``easiest`` takes
    a fixed share of the losses instead of those below the mean, which fixes the length of epochs.
    The paper has no cache; samples above the mean are visited in every epoch, so a cache ordered
    by loss is the one that suits. Source: Qin et al., "InfoBatch: Lossless Training Speed Up by
    Unbiased Dynamic Data Pruning", ICLR 2024.
    """
    return Recipe(
        "infobatch",
        "easy samples are left out by half, the rest reweighted; hard ones stay",
        policy=Score(),
        sampler=part(InfoBatchSampler, prune=prune, delta=delta, easiest=easiest),
    )

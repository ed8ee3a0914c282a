"""Neighbours of samples that have no embeddings: groups of samples that are like each other."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.recipes import Recipe
from stoker.recipes.part import part
from stoker.scores import Scores


class MadeUpGraph(Scorer):
    """SpiderCache's graph score over groups that are drawn once, in place of embeddings.

    Samples fall at random into groups, whose sizes are geometric with a mean of ``degree`` + 1; all
    of a group are neighbours of each other, and no others are. Within a group a share of the
    members, drawn from 0 to 2 ``mixing``, counts as of another class. Then x_same and x_other, and
    the score ln(1/x_same + x_other/neighbor_max + 1), follow (SpiderCache, ICPP 2025). So
    ``degree`` says how much one sample can stand in for, and a few samples lie alone.

    Not fitted to any training: neighbours do not change while a model learns, and hard samples are
    not also the lonely ones. For figures to be compared with a training, record its neighbours
    (``Loader(trace=PATH)``). Needs no signal but that a sample was visited. 12 bytes a sample.
    Raises :class:`~stoker.errors.ConfigError` for numbers out of range.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({"losses"})

    neighbours: Neighbours | None = None
    """Those of the batch scored last."""

    def __init__(
        self,
        num_samples: int,
        *,
        degree: float = 50.0,
        mixing: float = 0.1,
        neighbor_max: int = 500,
        seed: int = 0,
    ) -> None:
        if not 0 < degree <= neighbor_max or not 0 <= mixing <= 0.5:
            raise ConfigError(
                f"degree={degree}, mixing={mixing} are out of range: give more than 0 and at most "
                f"neighbor_max={neighbor_max}, and a share from 0 to 0.5"
            )
        rng = np.random.default_rng([seed, 0x62A])
        sizes = np.minimum(rng.geometric(1 / (degree + 1), num_samples), neighbor_max + 1)
        starts = np.cumsum(sizes) - sizes
        starts = starts[starts < num_samples]
        self._ends = np.append(starts[1:], num_samples)
        self._starts = starts
        self._members = rng.permutation(num_samples).astype(np.uint32)
        self._group = np.empty(num_samples, np.uint32)
        count = self._ends - starts
        self._group[self._members] = np.repeat(np.arange(len(starts)), count)
        others = np.floor(rng.uniform(0, 2 * mixing, len(starts)) * (count - 1))
        same = count - others  # the sample itself among them
        self._score = np.log(1 / same + others / neighbor_max + 1)

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the scores of a batch, and have its neighbours at hand."""
        ids = np.unique(observation.ids)
        group = self._group[ids]
        scores.update(ids, self._score[group], observation.step)
        count = self._ends[group] - self._starts[group]
        offsets = np.concatenate([[0], np.cumsum(count)])
        owner = np.repeat(np.arange(len(ids)), count)
        place = np.arange(int(offsets[-1])) - offsets[owner] + self._starts[group][owner]
        found: NDArray[np.uint32] = self._members[place]
        found = found[found != ids[owner]]
        self.neighbours = Neighbours(
            observation.step, ids, count - 1, offsets - np.arange(len(offsets)), found
        )


def with_made_up_graph(recipe: Recipe, seed: int = 0) -> Recipe:
    """Return ``recipe`` with made-up neighbours, if its scorer needs embeddings; else itself."""
    if "embeddings" not in recipe.scorer(1).needs:
        return recipe
    return replace(recipe, scorer=part(MadeUpGraph, seed=seed))

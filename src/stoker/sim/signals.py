"""What training would have shown: losses, given or made up, and neighbours made up."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.recipes import Recipe
from stoker.recipes.base import part
from stoker.scores import Scores


class Losses(Protocol):
    """Says what loss training would have seen."""

    def __call__(self, ids: NDArray[np.uint32], epoch: int) -> NDArray[np.float64]:
        """Return the losses f64[n] of samples ``u32[n]`` visited in ``epoch``, 0 or more."""
        ...


class GivenLosses:
    """Losses from a table: ``f64[N]`` for every epoch, or ``f64[E, N]``, whose last row lasts.

    Raises :class:`~stoker.errors.ConfigError` for another shape and for losses below 0 or not
    finite.
    """

    def __init__(self, losses: ArrayLike, num_samples: int) -> None:
        table = np.atleast_2d(np.asarray(losses, np.float64))
        if table.ndim != 2 or table.shape[1] != num_samples or not len(table):
            raise ConfigError(
                f"losses of shape {np.shape(losses)} are invalid: give one for each of "
                f"{num_samples} samples, [N] or [epochs, N]"
            )
        if not (np.isfinite(table) & (table >= 0)).all():
            raise ConfigError("losses are invalid: give finite numbers, 0 or more")
        self._table = table

    def __call__(self, ids: NDArray[np.uint32], epoch: int) -> NDArray[np.float64]:
        """Return the losses of ``ids`` in ``epoch``."""
        losses: NDArray[np.float64] = self._table[min(epoch, len(self._table) - 1), ids]
        return losses


class MadeUpLosses:
    """A population between easy and hard: loss = 2.3 (e + 1)^-0.6 x hardness x noise.

    Hardness (per sample, for good) and noise (per visit) are log-normal with median 1 and
    deviations ``spread`` and ``noise`` of the logarithm: losses fall as epochs go by, differ more
    between samples than between visits, and their ranks stay much the same. Not fitted to any
    training; give recorded losses for figures that are to be compared with one. Draws depend on
    ``seed``, the epoch and the sample only.
    """

    def __init__(
        self, num_samples: int, seed: int, spread: float = 1.5, noise: float = 0.5
    ) -> None:
        self._num_samples, self._seed, self._noise, self._spread = num_samples, seed, noise, spread
        self._epoch = -1

    @cached_property
    def _hardness(self) -> NDArray[np.float32]:
        rng = np.random.default_rng([self._seed, 0])
        return _log_normal(rng, np.empty(self._num_samples, np.float32), self._spread)

    @cached_property
    def _now(self) -> NDArray[np.float32]:
        return np.empty(self._num_samples, np.float32)

    def __call__(self, ids: NDArray[np.uint32], epoch: int) -> NDArray[np.float64]:
        """Return the losses of ``ids`` in ``epoch``."""
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, 1, epoch])
            now = _log_normal(rng, self._now, self._noise)
            now *= self._hardness
            now *= np.float32(2.3 * (epoch + 1) ** -0.6)
            self._epoch = epoch
        return self._now.take(ids).astype(np.float64)


def _log_normal(
    rng: np.random.Generator, out: NDArray[np.float32], deviation: float
) -> NDArray[np.float32]:
    """Fill f32[n] with median 1; in place, since there may be 100 million of them."""
    rng.standard_normal(out=out, dtype=np.float32)
    out *= np.float32(deviation)
    return np.exp(out, out=out)


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
        index = np.arange(int(offsets[-1])) - offsets[owner] + self._starts[group][owner]
        found: NDArray[np.uint32] = self._members[index]
        found = found[found != ids[owner]]
        self.neighbours = Neighbours(
            observation.step, ids, count - 1, offsets - np.arange(len(offsets)), found
        )


def with_made_up_graph(recipe: Recipe, seed: int = 0) -> Recipe:
    """Return ``recipe`` with made-up neighbours, if its scorer needs embeddings; else itself."""
    if "embeddings" not in recipe.scorer(1).needs:
        return recipe
    return replace(recipe, scorer=part(MadeUpGraph, seed=seed))

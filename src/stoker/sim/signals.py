"""What training would have shown: losses, given, made up or like recorded ones, and neighbours."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

import stoker._core as core
from stoker.errors import ConfigError
from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.recipes import Recipe
from stoker.recipes.base import part
from stoker.sampler.draws import permutation
from stoker.scores import Scores, distinct
from stoker.shared import in_parts, scratch
from stoker.sim.trace import Trace

Floats = NDArray[np.float64]

_DRAWN = 1 << 16  # at once: a thread that draws has to wait for its turn after each part
_POINTS = 513  # of each distribution
_MOST = 20_000  # samples by which persistence is measured
_LEAST = 30  # samples that two epochs must have in common
_LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_DECAYS = np.array([0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98])


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
        self._drawn: Future[None] | None = None

    @cached_property
    def _now(self) -> NDArray[np.float32]:
        memory: NDArray[np.float32] = scratch(self._num_samples, np.float32)
        return memory

    def begin_epoch(self, epoch: int) -> None:
        """Have the losses of ``epoch`` drawn in a thread; those of another one are forgotten."""
        if epoch == self._epoch:
            return
        self._wait()
        thread = ThreadPoolExecutor(1)
        self._drawn = thread.submit(self._draw, epoch)
        thread.shutdown(wait=False)
        self._epoch = epoch

    def __call__(self, ids: NDArray[np.uint32], epoch: int) -> NDArray[np.float64]:
        """Return the losses of ``ids`` in ``epoch``."""
        return self.of_all(epoch).take(ids).astype(np.float64)

    def of_all(self, epoch: int) -> NDArray[np.float32]:
        """Return ``f32[N]``, the losses of ``epoch``, until those of another one are asked for."""
        self.begin_epoch(epoch)
        self._wait()
        return self._now

    def _wait(self) -> None:
        if self._drawn is not None:
            self._drawn.result()

    def _draw(self, epoch: int) -> None:
        # Hardness is drawn again for each epoch, which takes less than to keep it weighs.
        of_samples = np.random.default_rng([self._seed, 0])
        of_visits = np.random.default_rng([self._seed, 1, epoch])
        memory = np.empty(min(_DRAWN, self._num_samples), np.float32)
        for at in range(0, self._num_samples, _DRAWN):
            now = _log_normal(of_visits, self._now[at : at + _DRAWN], self._noise)
            now *= _log_normal(of_samples, memory[: len(now)], self._spread)
            now *= np.float32(2.3 * (epoch + 1) ** -0.6)


@dataclass(frozen=True, eq=False)
class LossModel:
    """What losses of a training are like; immutable.

    Two things of recorded losses are kept. **How large they are**: the distribution of each epoch,
    as quantiles. **Who has them**: how much ranks persist from one epoch to another. A sample's
    standing in its epoch's distribution is that of

        z(e) = sqrt(a) hardness + sqrt(b) drift(e) + sqrt(1 - a - b) noise(e),

    all standard normal: hardness for good, drift a first-order autoregression with the coefficient
    phi, noise new in each epoch. Two epochs k apart then correlate by a + b phi^k, and a, b and phi
    are fitted to the correlations of the recorded ranks (a normal copula: Pearson's of z is
    2 sin(pi r / 6) of Spearman's r of the losses). What is not kept: that losses fall where
    training visits often, and how several visits within one epoch differ.
    """

    quantiles: Floats
    """``f64[E, Q]``: of the losses of each epoch, from the least to the largest."""
    hardness: float
    """a, the share of a standing's variance that stays for good."""
    drift: float
    """b, the share that changes slowly."""
    decay: float
    """phi, how much of the drift stays from one epoch to the next."""

    def correlation(self, lag: int) -> float:
        """Return how the standings of two epochs correlate that are ``lag`` > 0 apart."""
        return self.hardness + self.drift * self.decay**lag

    def population(self, num_samples: int, seed: int = 0) -> FittedLosses:
        """Return a population of so many samples."""
        return FittedLosses(self, num_samples, seed)


class FittedLosses:
    """Losses drawn from a model; see :class:`Losses`.

    Depend on ``seed``, the epoch and the sample only. Epochs after those of the model are like its
    last one. Holds some 40 bytes a sample. Raises :class:`~stoker.errors.ConfigError` for less
    than one sample.
    """

    def __init__(self, model: LossModel, num_samples: int, seed: int = 0) -> None:
        if num_samples < 1:
            raise ConfigError(f"num_samples={num_samples} is out of range: give at least 1")
        self._model, self._count, self._seed = model, num_samples, seed
        self._hardness = self._normal(0, 0)
        self._epoch = -1
        self._drift = np.empty(0)
        self._losses = np.empty(0)

    def __call__(self, ids: NDArray[np.uint32], epoch: int) -> Floats:
        """Return the losses ``f64[n]`` of ``ids`` in ``epoch``."""
        if epoch < self._epoch:
            self._epoch = -1
        if epoch != self._epoch:
            while self._epoch < epoch:
                self._epoch += 1
                self._drift_on()
            self._draw()
        losses: Floats = self._losses[ids]
        return losses

    def _drift_on(self) -> None:
        new = self._normal(1, self._epoch)
        if self._epoch == 0:
            self._drift = new
        else:
            phi = self._model.decay
            self._drift = phi * self._drift + np.sqrt(1 - phi**2) * new

    def _draw(self) -> None:
        model, epoch = self._model, self._epoch
        standing = np.sqrt(model.hardness) * self._hardness + np.sqrt(model.drift) * self._drift
        noise = max(0.0, 1 - model.hardness - model.drift)
        standing += np.sqrt(noise) * self._normal(2, epoch)
        row = model.quantiles[min(epoch, len(model.quantiles) - 1)]
        # By rank, so that the epoch's distribution is met whatever was drawn.
        share = (np.arange(self._count) + 0.5) / self._count
        self._losses = np.empty(self._count)
        self._losses[np.argsort(standing)] = np.interp(share, np.linspace(0, 1, len(row)), row)

    def _normal(self, part: int, epoch: int) -> Floats:
        rng = np.random.default_rng([self._seed, part, epoch])
        return rng.standard_normal(self._count)


def fit_losses(trace: Trace) -> LossModel:
    """Return a model of the losses of a recorded training, which is read once.

    Its epochs are those of the trace that have losses. Raises
    :class:`~stoker.errors.ConfigError` if these are fewer than two, or have too few samples in
    common to say how losses persist.
    """
    rows, quantiles = [], []
    chosen = _chosen(trace.num_samples)
    for found in trace:
        latest = np.full(trace.num_samples, np.nan)
        for ids, losses, is_aside in found.shown:
            if not is_aside:  # before the epoch, by a model that had not learned so much
                latest[ids] = losses
        if np.isnan(latest).all():
            continue
        known = latest[~np.isnan(latest)]
        quantiles.append(np.quantile(known, np.linspace(0, 1, _POINTS)))
        rows.append(latest[chosen].astype(np.float32))
    if len(rows) < 2:
        raise ConfigError(
            f"the trace {trace.path} has losses of {len(rows)} epochs: give one of 2 or more"
        )
    a, b, phi = _persistence(rows, str(trace.path))
    return LossModel(np.array(quantiles), a, b, phi)


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

    needs: ClassVar[frozenset[Signal]] = frozenset()

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
        ends = rng.geometric(1 / (degree + 1), num_samples)
        np.minimum(ends, neighbor_max + 1, out=ends)
        np.cumsum(ends, out=ends)
        starts = np.append(0, ends[: np.searchsorted(ends, num_samples)])
        del ends  # most of them are beyond the last sample
        self._ends = np.append(starts[1:], num_samples)
        self._starts = starts
        self._members = permutation(num_samples, rng).array
        count = self._ends - starts
        self._degree = count - 1
        each = scratch(num_samples, np.uint32)
        core.repeat(count.astype(np.uint32), each)
        self._group = scratch(num_samples, np.uint32)
        for some in in_parts(num_samples):
            self._group[self._members[some]] = each[some]
        others = np.floor(rng.uniform(0, 2 * mixing, len(starts)) * (count - 1))
        same = count - others  # the sample itself among them
        self._score = np.log(1 / same + others / neighbor_max + 1)

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the scores of a batch, and have its neighbours at hand."""
        ids = distinct(observation.ids)
        group = self._group.take(ids)
        scores.update(ids, self._score.take(group), observation.step)
        degree = self._degree.take(group)
        self.neighbours = Neighbours(observation.step, ids, degree, partial(self._others, ids))

    def _others(self, ids: NDArray[np.uint32], index: int) -> NDArray[np.uint32]:
        """Return the other members of the group of one of ``ids``."""
        group = self._group[ids[index]]
        members = self._members[self._starts[group] : self._ends[group]]
        others: NDArray[np.uint32] = members[members != ids[index]]
        return others


def with_made_up_graph(recipe: Recipe, seed: int = 0) -> Recipe:
    """Return ``recipe`` with made-up neighbours, if its scorer needs embeddings; else itself."""
    if "embeddings" not in recipe.scorer(1).needs:
        return recipe
    return replace(recipe, scorer=part(MadeUpGraph, seed=seed))


def _log_normal(
    rng: np.random.Generator, out: NDArray[np.float32], deviation: float
) -> NDArray[np.float32]:
    """Fill f32[n] with median 1; in place, since there may be 100 million of them."""
    rng.standard_normal(out=out, dtype=np.float32)
    out *= np.float32(deviation)
    return np.exp(out, out=out)


def _chosen(num_samples: int) -> NDArray[np.int64]:
    if num_samples <= _MOST:
        return np.arange(num_samples)
    return np.sort(np.random.default_rng(0).choice(num_samples, _MOST, replace=False))


def _persistence(rows: list[NDArray[np.float32]], path: str) -> tuple[float, float, float]:
    """Return a, b and phi that fit how ranks of these epochs correlate."""
    lags, found, weights = [], [], []
    for lag in _LAGS:
        pairs = [_correlation(rows[e], rows[e + lag]) for e in range(len(rows) - lag)]
        known = [pair for pair in pairs if pair is not None]
        if known:
            lags.append(lag)
            found.append(float(np.mean(known)))
            weights.append(len(known))
    if not lags:
        raise ConfigError(
            f"the epochs of {path} have fewer than {_LEAST} samples in common: give a longer trace"
        )
    return _least_squares(np.array(lags), np.array(found), np.sqrt(weights))


def _least_squares(
    lags: NDArray[np.int64], found: Floats, weights: Floats
) -> tuple[float, float, float]:
    """Return a, b >= 0, a + b <= 1 and phi for which a + b phi^lag is nearest to ``found``."""
    best, best_error = (0.0, 0.0, 0.0), np.inf
    for phi in _DECAYS.tolist():
        slow = phi**lags if phi else np.zeros(len(lags))
        parts = np.stack([np.ones(len(lags)), slow], axis=1) * weights[:, None]
        free = np.linalg.lstsq(parts, found * weights, rcond=None)[0]
        alone_a = np.array([np.average(found, weights=weights**2), 0.0])
        norm = float((parts[:, 1] ** 2).sum())
        alone_b = np.array([0.0, float(parts[:, 1] @ (found * weights)) / norm if norm else 0.0])
        for a, b in (free, alone_a, alone_b):
            if a < 0 or b < 0:
                continue
            a, b = np.array([a, b]) / max(1.0, a + b)
            error = float((((a + b * slow - found) * weights) ** 2).sum())
            if error < best_error - 1e-12:
                best, best_error = (float(a), float(b), phi), error
    return best


def _correlation(one: NDArray[np.float32], other: NDArray[np.float32]) -> float | None:
    """Return the correlation of standings of samples that both epochs visited; None for too few."""
    both = ~(np.isnan(one) | np.isnan(other))
    if both.sum() < _LEAST:
        return None
    first, second = _ranks(one[both]), _ranks(other[both])
    if first.std() == 0 or second.std() == 0:
        return None
    return float(2 * np.sin(np.pi / 6 * np.corrcoef(first, second)[0, 1]))


def _ranks(values: NDArray[np.float32]) -> Floats:
    """Return f64[n], the standing of each value in ascending order; equal ones share theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    standings: Floats = (ends - (counts - 1) / 2)[inverse]
    return standings

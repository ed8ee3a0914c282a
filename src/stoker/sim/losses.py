"""Losses of samples without a training: given, or of a population made up."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError


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

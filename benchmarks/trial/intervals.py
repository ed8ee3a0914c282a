"""Means over seeds with intervals that hold in 95 of 100 trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t


class Interval(NamedTuple):
    """A mean over seeds, and where it lies with a confidence of 95 %."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.told(2)

    def told(self, digits: int) -> str:
        """Return it with so many digits after the point; without bounds for a single seed."""
        mean, low, high = (f"{value:.{digits}f}" for value in self)
        return mean if np.isnan(self.low) else f"{mean} [{low}, {high}]"


def of_mean(values: Sequence[float]) -> Interval:
    """Return the mean of paired differences, with Student's interval."""
    found = np.asarray(values, np.float64)
    mean = float(found.mean())
    if len(found) < 2:
        return Interval(mean, np.nan, np.nan)
    error = float(found.std(ddof=1) / np.sqrt(len(found)) * t.ppf(0.975, len(found) - 1))
    return Interval(mean, mean - error, mean + error)


def of_ratio(values: Sequence[float]) -> Interval:
    """Return the mean of paired ratios, with its bootstrap interval over seeds."""
    found = np.asarray(values, np.float64)
    if len(found) < 2:
        return Interval(float(found.mean()), np.nan, np.nan)
    rounds = np.random.default_rng(0).integers(0, len(found), (10_000, len(found)))
    low, high = np.quantile(found[rounds].mean(axis=1), (0.025, 0.975))
    return Interval(float(found.mean()), float(low), float(high))

"""What several jobs know of the same samples, as one key: arrays in, arrays out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def counted(gains: Floats, thresholds: Floats) -> NDArray[np.bool_]:
    """Return bool[J]: the jobs whose scores count.

    Those that gain from the cache at least what their own ``thresholds`` f64[J] say (iCache: 1.5,
    HPCA 2023, multi-job). Where none does, all of them: somebody has to say who stays.
    """
    eligible = gains >= thresholds
    return eligible if eligible.any() else np.ones(len(gains), np.bool_)


def joint_value(values: Floats, gains: Floats, thresholds: Floats) -> Floats:
    """Return f64[n]: iCache's aggregated importance AIV_i = sum over jobs of gain_j x RIV_ij.

    Over the sum of these gains, so that a key written now compares with those written when gains
    were others, or other jobs counted; that changes no order among keys written at once.
    ``values`` f64[J, n] are relative importance values RIV, the percentile of a sample's importance
    within a job, in (0, 1]; 0 where the job has not seen it. A sample that no counted job has seen
    gets -inf, as with one job: nobody knows what it is worth. Source: Chen et al., HPCA 2023.
    """
    counts = counted(gains, thresholds)
    total = gains[counts] @ values[counts] / gains[counts].sum()
    return np.where(values[counts].max(axis=0, initial=0.0) > 0, total, -np.inf)


def soonest(
    positions: NDArray[np.int64],
    now: NDArray[np.int64],
    rates: Floats,
    periods: Floats,
    later: Floats | float = 0.0,
) -> Floats:
    """Return f64[n]: seconds until one of J jobs uses each sample, the least of them.

    ``positions`` i64[J, n]: the access by which a job uses the sample next, in its own count, of
    which it has reached ``now`` i64[J]; ``rates`` f64[J]: its accesses per second; ``periods``
    f64[J]: its accesses in an epoch. ``later`` (seconds, f64[n] or one): uses before that do not
    count. Of a job whose known use is before that, the next one is expected an epoch after it.
    """
    rates = known_rates(rates)[:, None]
    seconds = (positions - now[:, None]) / rates
    epochs = np.maximum(periods, 1.0)[:, None] / rates
    missed = np.ceil(np.maximum(0.0, later - seconds) / epochs)
    result: Floats = (seconds + missed * epochs).min(axis=0)
    return result


def known_rates(rates: Floats) -> Floats:
    """Return f64[J] accesses per second, with the mean of the others for jobs not measured yet."""
    measured = rates > 0
    if measured.all():
        return rates
    return np.where(measured, rates, rates[measured].mean() if measured.any() else 1.0)

"""Percentiles of a job's scores, kept up to date batch by batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Ranking:
    """Where a score stands among those of all samples of a job, as of the latest :meth:`learn`.

    iCache's relative importance value RIV: scores of different models differ in scale, their ranks
    do not. Not thread-safe.
    """

    def __init__(self) -> None:
        self._sorted: Floats = np.empty(0)
        self._seen = 0  # scores asked about since then

    def is_stale(self, scores: Floats, num_samples: int) -> bool:
        """Note a batch of scores f64[n]; return whether it is time to learn all of them anew.

        That is when all are given, when none is known, and when as many were given as are known.
        """
        self._seen += int(np.isfinite(scores).sum())
        return len(scores) == num_samples or self._seen > len(self._sorted)

    def learn(self, scores: Floats) -> None:
        """Take the scores f64[N] of all samples; -inf for those that nothing is known of."""
        self._sorted = np.sort(scores[np.isfinite(scores)])
        self._seen = 0

    def percentiles(self, scores: Floats) -> NDArray[np.float32]:
        """Return f32[n] in (0, 1]: the share of known scores that are at most these; 0 for -inf."""
        known = np.isfinite(scores)
        places = np.searchsorted(self._sorted, scores, side="right")
        share = np.clip(places, 1, None) / max(1, len(self._sorted))
        return np.where(known, np.minimum(share, 1.0), 0.0).astype(np.float32)

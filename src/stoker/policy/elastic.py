"""SpiderCache's elastic split between the importance and the homophily region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.policy.shares import Shares
from stoker.scores import Scores


@dataclass(frozen=True)
class ElasticSplit(Shares):
    """Importance shrinks once scores draw together, the later the faster accuracy grows.

    SpiderCache (ICPP 2025), for epoch t of T: sigma_t is the deviation of the scores (Eq. 4); beta
    is 1 from the first epoch on where sigma falls, 0 before (Eq. 5); Delta is the mean growth over
    m epochs of the accuracy smoothed after Savitzky and Golay (Eq. 6), u = Delta / (gamma + Delta);
    ratio = r_start - beta (r_start - r_end) (t / T)^(1 + u) (Eq. 8).

    Our reading where it leaves a choice: sigma falls when the least-squares line through its last m
    values does; accuracy that shrinks counts as no growth; without accuracies u is 0; without a
    known T, or before there are m deviations, the ratio is r_start. Raises
    :class:`~stoker.errors.ConfigError` for constants out of range, and once there are accuracies
    to smooth, without SciPy.
    """

    start: float = 0.9
    """r_start, the importance region's share of the two in the beginning."""
    end: float = 0.8
    """r_end, its share at the end of training, 0 < end <= start < 1."""
    m: int = 5
    """Epochs over which growth and fall are measured, 2 or more."""
    gamma: float = 0.01
    """Growth of accuracy (1 is all) an epoch at which u is one half; above 0."""
    window: int = 5
    """Accuracies that are smoothed together, odd, 3 or more."""
    order: int = 2
    """Degree of the smoothing polynomial, below ``window``."""

    @property
    def without_epochs(self) -> str:
        """What becomes of the split where the length of training is not known."""
        return f"the split between its regions stays at {self.start}"

    @property
    def without_accuracy(self) -> str:
        """What becomes of it where no accuracy is told."""
        return "the split between its regions moves at the same pace however accuracy grows"

    def __post_init__(self) -> None:
        if not 0 < self.end <= self.start < 1:
            raise ConfigError(
                f"start={self.start}, end={self.end} are refused: give 0 < end <= start < 1"
            )
        if self.m < 2 or not self.gamma > 0:
            raise ConfigError(f"m={self.m}, gamma={self.gamma} are refused: give m >= 2, gamma > 0")
        if self.window < 3 or self.window % 2 == 0 or not 0 <= self.order < self.window:
            raise ConfigError(
                f"window={self.window}, order={self.order} are refused: give an odd window of 3 "
                "or more and an order below it"
            )

    def shares(
        self, scores: Scores, epoch: int, epochs: int | None, counts: Mapping[str, int]
    ) -> dict[str, float]:
        """Return the shares of ``importance`` and ``homophily``."""
        ratio = self.ratio(scores.deviations[:epoch], scores.accuracies[:epoch], epoch, epochs)
        return {"importance": ratio, "homophily": 1 - ratio}

    def ratio(
        self,
        deviations: NDArray[np.float64],
        accuracies: NDArray[np.float64],
        epoch: int,
        epochs: int | None,
    ) -> float:
        """Return the share of the importance region in ``epoch``, from the epochs before it.

        ``deviations`` and ``accuracies`` f64[epoch], NaN where not known.
        """
        if not epochs or not self.falls(deviations):
            return self.start
        growth = self.growth(accuracies)
        exponent = 1 + growth / (self.gamma + growth)
        return float(self.start - (self.start - self.end) * min(1.0, epoch / epochs) ** exponent)

    def falls(self, deviations: NDArray[np.float64]) -> bool:
        """Whether the deviation of scores has begun to fall, in any m epochs so far (Eq. 5)."""
        known = deviations[np.isfinite(deviations)]
        if len(known) < self.m:
            return False
        # The sign of a least-squares slope is that of the sum weighted by centred times.
        times = np.arange(self.m) - (self.m - 1) / 2
        slopes = np.lib.stride_tricks.sliding_window_view(known, self.m) @ times
        return bool((slopes < -1e-12 * np.abs(known).max()).any())

    def growth(self, accuracies: NDArray[np.float64]) -> float:
        """Return Delta: the mean growth of the smoothed accuracy, 0 or more (Eq. 6)."""
        known = accuracies[np.isfinite(accuracies)]
        if len(known) < self.window:
            return 0.0
        try:
            from scipy.signal import savgol_filter
        except ImportError as error:
            raise ConfigError(
                "the elastic split smooths accuracy with SciPy: install stoker[importance]"
            ) from error
        smooth = savgol_filter(known, self.window, self.order)
        return max(0.0, float(np.diff(smooth)[-self.m :].mean()))

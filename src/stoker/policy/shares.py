"""How the cache is divided between its regions, epoch by epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.scores import Scores
from stoker.types import check_members


class Shares(ABC):
    """Divides the cache among regions when an epoch begins. Pure and immutable, as a policy is.

    An object that has ``shares`` without deriving from this class is completed by
    :func:`as_shares`.
    """

    @property
    def without_epochs(self) -> str:
        """What happens to the split if the length of training is not known; empty: nothing."""
        return ""

    @property
    def without_accuracy(self) -> str:
        """What happens to it if no accuracy is reported; empty: nothing."""
        return ""

    @abstractmethod
    def shares(
        self, scores: Scores, epoch: int, epochs: int | None, counts: Mapping[str, int]
    ) -> dict[str, float]:
        """Return region -> share of what these regions have together, 0 to 1, adding up to 1.

        ``epoch`` is about to begin, of ``epochs`` (None: not known). ``counts``: the accesses of
        the last epoch by the region where the sample belongs; empty before the first.
        """

    def for_cache(self, capacity: int, least_low: int) -> Shares | None:
        """Return this split for a cache of ``capacity`` bytes with ``least_low`` for packages.

        None, the default: it reserves nothing for packages.
        """
        return None


def as_shares(candidate: Any) -> Shares:
    """Return ``candidate`` as :class:`Shares`, with defaults for the optional members it lacks.

    Raises :class:`~stoker.errors.ConfigError` when it has no method ``shares``.
    """
    if isinstance(candidate, Shares):
        return candidate
    check_members(candidate, "split of a cache", ("shares",), "stoker.policy.Shares")
    return _Completed(candidate)


@dataclass(frozen=True)
class _Completed(Shares):
    """An object with the required method, completed by the defaults of :class:`Shares`."""

    own: Any

    @property
    def without_epochs(self) -> str:
        return str(getattr(self.own, "without_epochs", ""))

    @property
    def without_accuracy(self) -> str:
        return str(getattr(self.own, "without_accuracy", ""))

    def shares(
        self, scores: Scores, epoch: int, epochs: int | None, counts: Mapping[str, int]
    ) -> dict[str, float]:
        return cast("dict[str, float]", self.own.shares(scores, epoch, epochs, counts))

    def for_cache(self, capacity: int, least_low: int) -> Shares | None:
        fit = getattr(self.own, "for_cache", None)
        return None if fit is None else as_shares(fit(capacity, least_low))


@dataclass(frozen=True)
class FrequencySplit(Shares):
    """iCache's split: each region's share is its share of the accesses (HPCA 2023).

    Size_H = Size x f_H / (f_H + f_L), f being the accesses of the last epoch. L never has less
    than one package: see :meth:`for_cache`. With ``static``, as in ImPACT, that region has a fixed
    share, and while the scorer warms up (``scores.ready`` is False) all is H's. Raises
    :class:`~stoker.errors.ConfigError` for shares out of range.
    """

    high: str = "H"
    low: str = "L"
    start: float = 0.9
    """Share of H, of what H and L have, until there are counts, 0 < start < 1."""
    floor: float = 0.0
    """Least share of L, of what all regions named here have, 0 <= floor < 1."""
    static: str | None = None
    static_share: float = 0.25
    """Share of ``static``, 0 < static_share < 1."""

    def __post_init__(self) -> None:
        for name in ("start", "static_share"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is out of range: give a share, 0 < {name} < 1"
                )
        if not 0 <= self.floor <= self._divided:
            raise ConfigError(
                f"floor={self.floor} is out of range: give a share from 0 to {self._divided}"
            )

    def for_cache(self, capacity: int, least_low: int) -> FrequencySplit:
        """Return this split for a cache of ``capacity`` bytes whose L holds ``least_low`` or more.

        Raises :class:`~stoker.errors.ConfigError` when the cache is too small for that.
        """
        if least_low > capacity * self._divided:
            raise ConfigError(
                f"a cache of {capacity} bytes has no room for a package of {least_low}: give it "
                "more, or make packages smaller with Packaging(min_bytes=...)"
            )
        # Some bytes more, for those that rounding takes from budgets.
        return replace(self, floor=min((least_low + 8) / capacity, self._divided))

    def shares(
        self, scores: Scores, epoch: int, epochs: int | None, counts: Mapping[str, int]
    ) -> dict[str, float]:
        """Return the shares of H, of L, and of the static region if there is one."""
        if self.static is not None and not scores.ready:
            return {self.high: 1.0, self.low: 0.0, self.static: 0.0}
        high, low = counts.get(self.high, 0), counts.get(self.low, 0)
        part = high / (high + low) if high + low else self.start
        low_share = max(self._divided * (1 - part), self.floor)
        shares = {self.high: self._divided - low_share, self.low: low_share}
        return shares if self.static is None else {**shares, self.static: self.static_share}

    @property
    def _divided(self) -> float:
        return 1.0 if self.static is None else 1 - self.static_share


@dataclass(frozen=True)
class ElasticSplit(Shares):
    """The importance region shrinks once scores converge, more slowly while accuracy grows fast.

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
        """What happens to the split if the length of training is not known."""
        return f"the split between its regions stays at {self.start}"

    @property
    def without_accuracy(self) -> str:
        """What happens to it if no accuracy is reported."""
        return "the split between its regions moves at the same pace however accuracy grows"

    def __post_init__(self) -> None:
        if not 0 < self.end <= self.start < 1:
            raise ConfigError(
                f"start={self.start}, end={self.end} are out of range: give 0 < end <= start < 1"
            )
        if self.m < 2 or not self.gamma > 0:
            raise ConfigError(
                f"m={self.m}, gamma={self.gamma} are out of range: give m >= 2, gamma > 0"
            )
        if self.window < 3 or self.window % 2 == 0 or not 0 <= self.order < self.window:
            raise ConfigError(
                f"window={self.window}, order={self.order} are out of range: give an odd "
                "window of 3 or more and an order below it"
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

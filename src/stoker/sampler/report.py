"""How far a sampler's draw is from visiting every sample once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError


def counts(ids: ArrayLike, num_samples: int) -> NDArray[np.int64]:
    """Return i64[num_samples], how often each sample occurs in ``ids``; ConfigError for others."""
    given = np.asarray(ids)
    if given.size and not 0 <= int(given.min()) <= int(given.max()) < num_samples:
        raise ConfigError(f"ids from {given.min()} to {given.max()} are not of {num_samples}")
    return np.bincount(given.astype(np.int64), minlength=num_samples)


def ess(counts: ArrayLike) -> float:
    """Return the effective sample size of inclusion counts or weights: (sum n)^2 / sum n^2.

    N when all are equal, less the more unequal they are, 0 when there are none. Source: Kish,
    Survey Sampling, 1965.
    """
    n = np.asarray(counts)
    n = n.astype(np.float64) if n.dtype.kind == "f" else n  # what is counted sums up exactly
    squares = float(np.einsum("i,i", n.ravel(), n.ravel(), dtype=np.float64))
    return float(n.sum()) ** 2 / squares if squares else 0.0


def coverage(counts: ArrayLike) -> float:
    """Return the share of samples that were visited at all; 0 when there are no samples."""
    n = np.asarray(counts)
    return float((n > 0).mean()) if n.size else 0.0


def repeat_share(counts: ArrayLike) -> float:
    """Return the share of accesses that repeat an earlier one; 0 when there are none."""
    n = np.asarray(counts)
    total = int(n.sum())
    return 1 - int((n > 0).sum()) / total if total else 0.0

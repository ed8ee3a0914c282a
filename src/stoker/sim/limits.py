"""Closed forms: what a cache can hit at best, what known policies hit, how long epochs must take.

``c`` is the cache's share of the data set's bytes, ``k`` the number of samples that it holds when
all are equal, ``p`` (``f64[N]``) how likely each sample is drawn. All results are steady states:
the first accesses of all, which no cache hits, are not in them. Functions are pure, take arrays
where they say so, and raise :class:`~stoker.errors.ConfigError` for values that have no meaning.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError
from stoker.recipes.baselines import lru_hit_ratio, random_hit_ratio
from stoker.sampler.draws import ess

__all__ = [
    "belady_draws",
    "epoch_seconds",
    "epoch_seconds_shared",
    "ess",
    "lru_draws",
    "lru_epochs",
    "most_repeats",
    "random_epochs",
    "shade",
    "smallest_first",
    "stall_free_misses",
    "storage_rate",
    "super_epoch_repeats",
    "super_epochs",
    "top_k",
    "uniform",
]

_HALVINGS = 100  # of an interval whose ends differ by a factor of 2: far below a double's precision

# --- each sample once an epoch ---


def uniform(c: ArrayLike) -> NDArray[np.float64]:
    """Return f64 of the shape of ``c``: the byte hit ratio that nothing exceeds, c itself.

    Each reuse crosses one epoch boundary, and at most the cache survives it. MinIO (CoorDL, VLDB
    2021) and Belady's rule reach it. With equal sizes it bounds the number of hits as well.
    """
    return np.minimum(1.0, _non_negative("c", c))


def smallest_first(sizes: ArrayLike, capacity: float) -> float:
    """Return the share of accesses that hit at best when ``sizes`` (``[N]``, bytes) differ.

    As :func:`uniform`, counted in samples: the smallest ones that fit into ``capacity`` bytes.
    """
    held = np.sort(_non_negative("sizes", sizes)).cumsum()
    _non_negative("capacity", capacity)
    return float(np.searchsorted(held, capacity, side="right") / max(1, len(held)))


def lru_epochs(c: ArrayLike) -> NDArray[np.float64]:
    """Return f64 of the shape of ``c``: LRU's hit ratio, c + (1 - c) ln(1 - c).

    2, 9, 23 and 48 % at c = .2, .4, .6, .8, as iCache (HPCA 2023) and ImPACT (TC 2025) measured.
    """
    return _each(lru_hit_ratio, c)


def random_epochs(c: ArrayLike) -> NDArray[np.float64]:
    """Return f64 of the shape of ``c``: the hit ratio of eviction at random.

    -c ln(1 - c + c e^(-1/c)); :mod:`stoker.recipes.baselines` derives it.
    """
    return _each(random_hit_ratio, c)


# --- independent draws with probabilities p ---


def top_k(p: ArrayLike, k: float) -> float:
    """Return the hit ratio of keeping the ``k`` samples that are drawn most often.

    Part of a sample counts in proportion. The best that a cache without knowledge of the coming
    draws can do (Aho, Denning and Ullman, "Principles of Optimal Page Replacement", JACM 1971).
    """
    held = np.concatenate([[0.0], np.sort(_probabilities(p))[::-1].cumsum()])
    return float(np.interp(_non_negative("k", k), np.arange(len(held)), held))


def lru_draws(p: ArrayLike, k: float) -> float:
    """Return LRU's hit ratio by Che's approximation.

    sum p_i (1 - e^(-p_i T)), with T such that sum (1 - e^(-p_i T)) = k: a sample is found if it
    was drawn within the last T. Source: Che, Tung and Wang, "Hierarchical Web Caching Systems",
    IEEE JSAC 20 (2002), Eq. 3 and 5.
    """
    drawn = _probabilities(p)
    if k >= np.count_nonzero(drawn):
        return 1.0
    time = _solve(lambda t: float(-np.expm1(-drawn * t).sum()), float(_non_negative("k", k)))
    return float(-(drawn * np.expm1(-drawn * time)).sum())


def belady_draws(p: ArrayLike, k: float) -> float:
    """Return the hit ratio of Belady's rule, which knows all coming draws.

    sum p_i (1 - e^(-p_i t)), with t such that sum (1 - e^(-p_i t) (1 + p_i t)) = k: a sample is
    kept from one draw to the next if that is at most t away, which is the shortest gaps that
    fill the cache, and is in the cache for that part of the time. Exact for many samples.
    """
    drawn = _probabilities(p)
    if k >= np.count_nonzero(drawn):
        return 1.0

    def held(t: float) -> float:
        due = drawn * t
        return float((1 - np.exp(-due) * (1 + due)).sum())

    gap = _solve(held, float(_non_negative("k", k)))
    return float(-(drawn * np.expm1(-drawn * gap)).sum())


def shade(p: ArrayLike, k: float, repetition: float = 1.0) -> float:
    """Return SHADE's hit ratio, min(1, r x the top-k share of draws).

    The public code draws what is cached ``repetition`` times as often: 3 x .233 = .70 is the
    paper's 72.5 % at a cache of 20 % (Khan et al., FAST 2023).
    """
    return min(1.0, float(_non_negative("repetition", repetition)) * top_k(p, k))


# --- super-epochs ---


def super_epoch_repeats(repeat: ArrayLike) -> NDArray[np.float64]:
    """Return f64 of the shape of ``repeat``: q, the share of accesses that repeat in their epoch.

    With each sample R times in R epochs of random order an epoch leaves out (1 - 1/R)^R of the
    samples, and as many accesses repeat: .25 for R = 2, .32 for R = 4.
    """
    times = np.asarray(repeat, np.float64)
    if not (times >= 1).all():
        raise ConfigError(f"repeat={repeat!r} is out of range: give 1 epoch or more")
    return np.power(1 - 1 / times, times)


def super_epochs(c: ArrayLike, repeats: ArrayLike) -> NDArray[np.float64]:
    """Return f64: the hit ratio that nothing exceeds when a share of accesses repeats, c + q.

    ``repeats``: q, 0 to 1. An access that repeats one of its own epoch may always hit; of the
    others, as in :func:`uniform`, those whose samples survived the boundary.
    """
    return np.minimum(1.0, uniform(c) + _non_negative("repeats", repeats))


def most_repeats(ess: ArrayLike) -> NDArray[np.float64]:
    """Return f64: q, the largest share of accesses that repeat at this effective sample size / N.

    ``ess``: above 0 to 1, of an epoch of N visits to N samples. The visits are then spread as
    evenly over the distinct samples as whole numbers allow, m or m + 1 to each. With
    :func:`super_epochs` this bounds the hits of any plan.
    """
    size = np.asarray(ess, np.float64)
    if not ((size > 0) & (size <= 1)).all():
        raise ConfigError(f"ess={ess!r} is out of range: give shares above 0, up to 1")
    # Of k N distinct samples, 1 - k m N come m + 1 times: sum n^2 / N = 2 m + 1 - k m (m + 1).
    squares = 1 / size
    m = np.floor(squares)
    repeats: NDArray[np.float64] = 1 - (2 * m + 1 - squares) / (m * (m + 1))
    return repeats


# --- time ---


def storage_rate(
    size: ArrayLike, bandwidth: float, iops: float, concurrency: float, latency: float
) -> NDArray[np.float64]:
    """Return f64 of the shape of ``size``: samples a second that storage delivers.

    min(bandwidth / size, IOPS, concurrency / latency). ``size`` in bytes, ``bandwidth`` in bytes a
    second, ``iops`` requests a second, ``latency`` in seconds; infinite, or latency 0: no limit.
    """
    sizes = _positive("size", size)
    by_latency = np.inf if _non_negative("latency", latency) == 0 else concurrency / latency
    at_once = min(float(_positive("iops", iops)), float(_positive("concurrency", by_latency)))
    return np.minimum(_positive("bandwidth", bandwidth) / sizes, at_once)


def stall_free_misses(storage: ArrayLike, compute: ArrayLike) -> NDArray[np.float64]:
    """Return f64: m* = X_storage / X_compute, at most 1; training never waits at fewer misses.

    Both in samples a second.
    """
    return np.minimum(1.0, _positive("storage", storage) / _positive("compute", compute))


def epoch_seconds(
    accesses: ArrayLike,
    misses: ArrayLike,
    storage: ArrayLike,
    compute: ArrayLike,
    decode_seconds: ArrayLike = 0.0,
    workers: ArrayLike = 1,
) -> NDArray[np.float64]:
    """Return f64, broadcast: the least seconds of an epoch that trains beside the processors.

    max(A / X_compute, m A / X_storage, A d / W): ``misses`` m as a share, ``storage`` and
    ``compute`` in samples a second, ``decode_seconds`` of one sample on one of ``workers`` cores.
    """
    count = _non_negative("accesses", accesses)
    storing = _non_negative("misses", misses) * count / _positive("storage", storage)
    decoding = count * _non_negative("decode_seconds", decode_seconds)
    training = count / _positive("compute", compute)
    return _largest(training, storing, decoding / _positive("workers", workers))


def epoch_seconds_shared(
    accesses: ArrayLike,
    misses: ArrayLike,
    storage: ArrayLike,
    compute_seconds: ArrayLike,
    decode_seconds: ArrayLike,
    cores: ArrayLike,
) -> NDArray[np.float64]:
    """Return f64: the least seconds of an epoch that trains and decodes on the same cores.

    max(m A / X_storage, A (compute + decode) / cores), with processor seconds of one sample.
    """
    count = _non_negative("accesses", accesses)
    both = _non_negative("compute_seconds", compute_seconds)
    both = both + _non_negative("decode_seconds", decode_seconds)
    storing = _non_negative("misses", misses) * count / _positive("storage", storage)
    return _largest(storing, count * both / _positive("cores", cores))


# --- inside ---


def _each(rule: Callable[[float], float], c: ArrayLike) -> NDArray[np.float64]:
    """Return the rule's values; a cache of more than everything counts as one of everything."""
    shares = uniform(c)
    return np.array([rule(share) for share in shares.ravel().tolist()]).reshape(shares.shape)


def _largest(*terms: NDArray[np.float64]) -> NDArray[np.float64]:
    largest: NDArray[np.float64] = np.stack(np.broadcast_arrays(*terms)).max(axis=0)
    return largest


def _solve(held: Callable[[float], float], wanted: float) -> float:
    """Return where ``held``, which grows from 0 at 0, reaches ``wanted``."""
    if wanted == 0:
        return 0.0
    high = 1.0
    while held(high) < wanted:
        high *= 2
    low = high / 2 if high > 1 else 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if held(middle) < wanted else (low, middle)
    return high


def _probabilities(p: ArrayLike) -> NDArray[np.float64]:
    weights = _non_negative("p", p)
    if weights.ndim != 1 or not weights.sum() > 0:
        raise ConfigError(f"p of shape {weights.shape} is invalid: give weights [N], not all 0")
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def _non_negative(name: str, given: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(given, np.float64)
    if not (array >= 0).all():
        raise ConfigError(f"{name}={given!r} is out of range: give 0 or more")
    return array


def _positive(name: str, given: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(given, np.float64)
    if not (array > 0).all():
        raise ConfigError(f"{name}={given!r} is out of range: give more than 0")
    return array

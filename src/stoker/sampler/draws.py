"""The random numbers of an epoch, draws of a fixed size by them, and how even a draw is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import stoker._core as core
from stoker.errors import ConfigError
from stoker.scores import Scores
from stoker.shared import SharedArray, in_parts, scratch


def generator(seed: int, epoch: int, stream: int = 0) -> np.random.Generator:
    """Return the generator of ``epoch``: counter-based, so no epoch needs those before it.

    Philox keyed by (seed, epoch); streams, from 0, are far apart in its counter. Raises
    :class:`~stoker.errors.ConfigError` for an epoch below 0.
    """
    if not 0 <= epoch < 2**64:
        raise ConfigError(f"epoch={epoch} is out of range: count from 0")
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, stream]))


def shuffle(items: NDArray[Any], rng: np.random.Generator, since: int = 0) -> None:
    """Put ``items`` ``[n]`` of 1, 4 or 8 bytes into random order: what ``rng.shuffle(items)`` does.

    With the same draws, but faster: places in memory are fetched before their turn. Only the items
    from ``since`` on are wanted, and no more is drawn for the others. In place, and without the
    GIL. Raises :class:`~stoker.errors.ConfigError` for items of other sizes.
    """
    with rng.bit_generator.lock:
        core.shuffle(items, rng.bit_generator.capsule, since)


def multinomial(size: int, p: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.uint32]:
    """Return u32[N], how often each of N comes in ``size`` draws of probabilities ``p`` (f64[N]).

    What ``rng.multinomial(size, p)`` returns, with the same draws, but faster and in half the
    memory. ``p`` must sum to 1, up to rounding, and ``size`` be below 2^32.
    """
    counts, before = scratch(len(p), np.uint32), rng.bit_generator.state
    with rng.bit_generator.lock:
        if core.multinomial(size, p, rng.bit_generator.capsule, counts):
            return counts
    rng.bit_generator.state = before
    return rng.multinomial(size, p).astype(np.uint32)


def repeated_in_random_order(counts: NDArray[np.uint32], rng: np.random.Generator) -> SharedArray:
    """Return u32[sum], each index as often as ``counts`` (u32[N]) says, in memory for a plan."""
    ids = SharedArray.create(int(counts.sum(dtype=np.int64)), np.uint32, name="plan.ids")
    core.repeat(counts, ids.array)
    shuffle(ids.array, rng)
    return ids


def permutation(count: int, rng: np.random.Generator) -> SharedArray:
    """Return u32[count], 0 to count - 1 in random order, in memory that a plan can take over."""
    order = SharedArray.create(count, np.uint32, name="plan.ids")
    for part in in_parts(count):
        order.array[part] = np.arange(part.start, part.stop, dtype=np.uint32)
    shuffle(order.array, rng)
    return order


def systematic(
    inclusion: NDArray[np.float64], size: int, rng: np.random.Generator
) -> NDArray[np.uint32]:
    """Return u32[size], distinct indices in random order; i is one with probability inclusion[i].

    ``inclusion`` f64[N] from 0 to 1 must sum to ``size``; what has probability 1 is always taken.
    Systematic sampling in random order: the probabilities laid end to end in a line, one random
    start, then a step of one (Madow, Annals of Mathematical Statistics 1949).
    """
    ids, begin = _drawable(inclusion)
    rest = ids[begin:]
    shuffle(rest, rng)
    left = max(0, min(size - begin, len(rest)))
    if left:
        core.draw_among(rest, inclusion, rng.random(), left)
    drawn = ids[: begin + left]
    shuffle(drawn, rng)
    return drawn


def _drawable(inclusion: NDArray[np.float64]) -> tuple[NDArray[np.uint32], int]:
    """Return u32[n], the indices of probabilities above 0, and how many come first, those of 1."""
    every = len(inclusion)
    certain = sum(int(np.count_nonzero(inclusion[part] >= 1)) for part in in_parts(every))
    positive = sum(int(np.count_nonzero(inclusion[part] > 0)) for part in in_parts(every))
    found = scratch(positive, np.uint32)
    ends = [0, certain]
    for part in in_parts(every):
        chance = inclusion[part]
        for kind, chosen in enumerate([chance >= 1, (chance > 0) & (chance < 1)]):
            some = np.flatnonzero(chosen)
            found[ends[kind] : ends[kind] + len(some)] = some + part.start
            ends[kind] += len(some)
    return found, certain


def _along(
    order: NDArray[np.uint32],
    parts: NDArray[np.float64],
    size: int,
    rng: np.random.Generator,
) -> NDArray[np.uint32]:
    """Return u32[size], those of u32[n] ``order`` that points at equal distances fall on.

    ``parts`` f64[n] is what each takes of their line.
    """
    left = min(size, len(order))
    if left <= 0:
        return order[:0]
    drawn = scratch(left, np.uint32)
    core.draw_along(order, parts, rng.random(), drawn)
    return drawn


def systematic_visits(
    visits: NDArray[np.float64], rng: np.random.Generator, times: int = 1, since: int = 0
) -> NDArray[np.uint32]:
    """Return u32[sum], indices in random order; i comes ``times`` x visits[i] times in the mean.

    Never less often than that rounded down, nor more often than rounded up. ``visits`` f64[N], 0 or
    more, times ``times`` must sum to a whole number, up to rounding. Only those from the place
    ``since`` on are returned, in less time. What is worked with is made in parts: there may be 100
    million samples.
    """
    counts = np.empty(len(visits), np.uint32)  # rounded down
    order, filled = scratch(len(visits), np.uint32), 0
    for part in in_parts(len(visits)):
        every = times * visits[part]
        counts[part] = every
        rest = np.flatnonzero(every > counts[part])
        order[filled : filled + len(rest)] = rest + part.start
        filled += len(rest)
    order = order[:filled]
    shuffle(order, rng)
    rests = scratch(len(order), np.float64)
    for part in in_parts(len(order)):
        wanted = times * visits.take(order[part])
        rests[part] = wanted - np.floor(wanted)
    size = round(times * float(visits.sum())) - int(counts.sum(dtype=np.int64))
    drawn = _along(order, rests, size, rng)
    core.count(counts.view(np.int32), drawn)
    # Their order is drawn too, and not needed: what follows is to be drawn from where that ends.
    shuffle(np.empty(len(drawn), np.uint8), rng)
    del order, rests, drawn
    ids = scratch(int(counts.sum(dtype=np.int64)), np.uint32)
    core.repeat(counts, ids)
    del counts
    shuffle(ids, rng, since)
    return ids[since:]


def annealed_from(epochs: int, share: float) -> int:
    """Return the first epoch of the annealed end, the last ``share`` of so many epochs."""
    # Rounded first: 0.1 x 30 is a little more than 3.
    return epochs - math.ceil(round(share * epochs, 9))


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
    return int(np.count_nonzero(n)) / n.size if n.size else 0.0


def repeat_share(counts: ArrayLike) -> float:
    """Return the share of accesses that repeat an earlier one; 0 when there are none."""
    n = np.asarray(counts)
    total = int(n.sum())
    return 1 - int((n > 0).sum()) / total if total else 0.0


def scores_or_median(scores: Scores) -> NDArray[np.float64]:
    """Return f64[N], the scores, none below 0; a sample not seen yet has the median of the others.

    So unseen samples are visited as often as the typical one. All zero, which gives nothing to
    draw by, becomes all one.
    """
    values: NDArray[np.float64] = scratch(len(scores), np.float64)
    values[:] = scores.values
    unseen = scores.seen == 0
    if unseen.any():
        values[unseen] = core.median(scores.values, scores.seen)
    np.fmax(values, 0.0, out=values)  # where none was seen, there is no median
    return values if values.any() else np.ones(len(values))

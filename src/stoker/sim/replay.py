"""Replay of a recipe: the samplers, scorers and policies of training, without model or storage."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError
from stoker.recipes import Recipe, as_recipe
from stoker.shared import private_arrays
from stoker.sim.clock import Conditions
from stoker.sim.job import Accesses, Job
from stoker.sim.played import RecordedLosses, Visits, as_trace, scored_by
from stoker.sim.replayed_cache import ReplayedCache
from stoker.sim.result import SimResult
from stoker.sim.signals import GivenLosses, Losses, MadeUpLosses
from stoker.sim.trace import Trace
from stoker.types import parse_bytes

IMAGENET_MEAN = 110_000
"""Bytes of a sample where no sizes are given: the mean of ImageNet's images."""


def replay(
    recipe: str | Recipe,
    num_samples: int,
    epochs: int,
    cache: int | float | str,
    sizes: ArrayLike | None = None,
    losses: ArrayLike | Losses | None = None,
    trace: Sequence[ArrayLike] | str | os.PathLike[str] | Trace | None = None,
    seed: int = 0,
    *,
    batch_size: int | None = None,
    cached: float | ArrayLike | None = None,
    conditions: Conditions | None = None,
    read_ahead: int = 0,
    progress: Callable[[], None] | None = None,
) -> SimResult:
    """Return what a training of ``epochs`` epochs would hit in a cache.

    The recipe's own sampler, scorer, policy, regions, places, shares, substitution and packaging
    run over a native arena, as in the Loader with one rank, but for the bytes: the arena counts
    those of samples and stores none. Deterministic.

    ``recipe``: a Recipe or its text. ``cache``: a share of the data set's bytes
    if a float, else as the Loader's. ``sizes``: ``i64[N]`` bytes; by default all have
    :data:`IMAGENET_MEAN`. ``losses``: ``f64[N]``, ``f64[epochs, N]`` or a function of (ids, epoch);
    by default :class:`~stoker.sim.signals.MadeUpLosses`. ``trace``: the accesses of each epoch
    (``[A]`` integers) in place of the sampler's; or what ``Loader(trace=PATH)`` wrote, whose
    accesses, batches, sizes and losses are then those of the replay, and the scores and neighbours
    where the recipe scores by more than losses. ``batch_size`` is otherwise a five-hundredth
    of the samples, from 256 to 4096. ``cached``: bytes of the samples as they are cached,
    ``i64[N]`` or a factor of ``sizes``, where a stage makes them smaller; ``cache`` is still a
    share of ``sizes``, and these are what is read. ``conditions``: what storage and processors are
    like, to have the time of each epoch computed. ``read_ahead``: bytes on top of the cache for
    what a prefetch process reads before it is needed, as far as the storage of ``conditions`` has
    time for it; 0: as without one. What training shows reaches scores as many batches later as the
    workers of ``conditions`` are ahead. ``progress`` is called after each epoch.

    Raises :class:`~stoker.errors.ConfigError` for arguments out of range, for scorers that need
    more than losses, and for a cache that the recipe finds too small.
    """
    chosen = as_recipe(recipe)
    accesses: Accesses | Visits | None = None
    recorded = as_trace(trace, num_samples)
    if recorded is not None:
        accesses, sizes = Visits(recorded), recorded.sizes if sizes is None else sizes
        losses = RecordedLosses(recorded) if losses is None else losses
        batch_size = recorded.batch_size if batch_size is None else batch_size
        if chosen.scorer(num_samples).needs - {"losses"}:
            chosen = scored_by(chosen, recorded)
    elif trace is not None:
        accesses = Accesses(trace, num_samples)  # type: ignore[arg-type]
    if accesses is not None and len(accesses) < epochs:
        raise ConfigError(f"the trace has {len(accesses)} epochs and {epochs} are asked for")
    lengths = as_sizes(sizes, num_samples)
    batch_size = default_batch(num_samples) if batch_size is None else batch_size
    if read_ahead < 0:
        raise ConfigError(f"read_ahead={read_ahead} is out of range: give 0 bytes or more")
    if epochs < 1 or batch_size < 1:
        raise ConfigError(
            f"epochs={epochs}, batch_size={batch_size} are out of range: give 1 or more"
        )
    share = as_share(cache, lengths)
    kept = as_cached(cached, lengths)
    told = as_losses(losses, num_samples, seed)
    per_epoch = []
    held, lag = held_share(share, lengths, kept), 0
    if read_ahead and conditions is not None:
        lag = conditions.workers * conditions.ahead
    window = read_ahead
    with (
        private_arrays(),
        ReplayedCache(chosen, kept, held, seed, batch_size=batch_size, window=window) as replayed,
    ):
        job = Job(chosen, replayed, told, epochs, batch_size, seed, accesses, lag=lag)
        if conditions is not None:
            job.keep_time(conditions, lengths)
        for _ in range(epochs):
            per_epoch.append(job.run())
            if progress is not None:
                progress()
    return SimResult(chosen.name, num_samples, share, tuple(per_epoch))


def default_batch(num_samples: int) -> int:
    """Return the samples of a batch where none are given: large data sets come in large batches."""
    return int(np.clip(num_samples // 500, 256, 4096))


def as_sizes(sizes: ArrayLike | None, num_samples: int) -> NDArray[np.int64]:
    """Return ``i64[num_samples]`` bytes; ConfigError for what are none."""
    if num_samples < 1:
        raise ConfigError(f"num_samples={num_samples} is out of range: give at least 1")
    if sizes is None:
        return np.broadcast_to(np.int64(IMAGENET_MEAN), num_samples)  # takes no memory
    lengths = np.asarray(sizes)
    if lengths.shape != (num_samples,) or lengths.dtype.kind not in "iu" or (lengths < 1).any():
        raise ConfigError(
            f"sizes of shape {lengths.shape}, {lengths.dtype} are no sizes: give bytes, 1 or more, "
            f"as integers for each of {num_samples} samples"
        )
    return lengths.astype(np.int64)


def as_cached(cached: float | ArrayLike | None, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``i64[N]``, bytes of samples as they are cached; ConfigError for what are none."""
    if cached is None:
        return sizes
    if np.ndim(cached) > 0:
        return as_sizes(cached, len(sizes))
    factor = float(cached)  # type: ignore[arg-type]
    if not 0 < factor < math.inf:
        raise ConfigError(f"cached={cached!r} is no factor: give a number above 0, or sizes")
    scaled: NDArray[np.int64] = np.ceil(sizes * factor).astype(np.int64)
    return scaled


def held_share(share: float, sizes: NDArray[np.int64], cached: NDArray[np.int64]) -> float:
    """Return the share of all ``cached`` bytes that ``share`` of the bytes ``sizes`` can hold."""
    return min(1.0, share * float(sizes.sum()) / float(cached.sum()))


def as_share(cache: int | float | str, sizes: NDArray[np.int64]) -> float:
    """Return the cache's share of the data set's bytes, at most 1."""
    total = int(sizes.sum())
    if isinstance(cache, float):
        if not math.isfinite(cache) or not 0 <= cache <= 1:
            raise ConfigError(f"cache={cache!r} is out of range: a float is a share, from 0 to 1")
        return cache
    return min(1.0, parse_bytes(cache, of=total) / total)


def as_losses(losses: ArrayLike | Losses | None, num_samples: int, seed: int) -> Losses:
    """Return what says the losses."""
    if losses is None:
        return MadeUpLosses(num_samples, seed)
    return losses if callable(losses) else GivenLosses(losses, num_samples)

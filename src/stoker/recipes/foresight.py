"""Foresight: eviction by a plan that is known, and may be made so that more of it hits."""

from __future__ import annotations

from typing import Any

from stoker.errors import ConfigError
from stoker.policy.next_use import AsPlanned, NextBlock, NextUse, OnceAnEpoch
from stoker.recipes.base import Recipe, SamplerFactory, part
from stoker.sampler.baselines import InfoBatchSampler
from stoker.sampler.blocks import BlockSampler, check_blocks, fit_window
from stoker.sampler.importance import ImportanceSampler
from stoker.sampler.super_epochs import AdaptiveSampler, Room, SuperEpochSampler, unfitted


def foresight(
    repeat: int = 1,
    importance: bool = False,
    prune: float = 0.0,
    adaptive: bool = False,
    annealed: float = 0.125,
    request_bytes: float | None = None,
    uniform_part: float | None = None,
    min_ess: float | None = None,
    window: float | None = None,
    static: float | None = None,
    block: int = 1,
) -> Recipe:
    """Return the recipe that knows the plan of coming accesses, and may make a better one.

    By default each sample is visited once an epoch, and nothing about training changes: the cache
    keeps the smallest samples, and what any job needs next where several share it
    (:class:`~stoker.policy.next_use.OnceAnEpoch`). The options below
    evict the sample needed latest instead, and with each of them the expected gradient of a step
    is that of all samples, once ``loader.weights`` are applied:

    - ``repeat`` R: each sample exactly R times in R epochs, without weights, all R within a window
      of some epochs. A cache that holds the samples which are within theirs reads each sample once
      in R epochs: 77 % of all accesses hit at a cache of 20 % with R = 4, 88 % with R = 8. If sizes
      differ the smallest samples are static: they stay cached and come once an epoch. Windows are
      chosen for the cache (:class:`~stoker.sampler.super_epochs.Room`), unless ``window`` says how
      many epochs they take, and ``static`` which share of the cache's bytes static samples have.
      No batch has a sample twice: the Loader refuses windows too short for that.
    - ``importance``: N visits an epoch in proportion to clipped losses, mixed with the share
      ``uniform_part`` of uniform ones (.2 by default), or more where the effective sample size of
      the weights fell below ``min_ess`` (.7); ``loader.weights`` undo the bias. With ``repeat``
      the visits of R epochs are drawn at once. Where the next visit is not drawn yet, the
      expected one counts.
    - ``prune``: this share of the samples below the mean loss is left out of each epoch, at random;
      ``loader.weights``, whose mean is one, give the others of them their share (InfoBatch, whose
      weights make each step larger instead). An epoch has fewer steps.
    - ``adaptive``: the default while storage keeps up; where it does not, as few repeats in as
      long windows as storage can feed (:class:`~stoker.sampler.super_epochs.AdaptiveSampler`).
      What is done, and why, is logged as each epoch begins.

    - ``block`` B: each sample once an epoch; B adjacent ones of a shard are read by one request.
      Blocks come in random order, and their samples at random within a window: as many accesses
      as the cache has room for samples, unless ``window`` says how many epochs, 1 at most. Until
      bytes bind, storage answers a B-th of the requests
      (:class:`~stoker.sampler.blocks.BlockSampler`).

    The last share ``annealed`` of the training, for which the Loader needs ``epochs``,
    visits each sample once an epoch again. ``request_bytes``, the cost of a request on top of its
    bytes (bandwidth / requests a second, or latency x bandwidth), keeps small samples rather than
    large ones. Where each sample comes once an epoch that costs no bytes, so the default is 10 MB
    there, and 0 otherwise; while other jobs use the cache, it is limited to a tenth of a mean
    sample. Raises :class:`~stoker.errors.ConfigError` for ``prune``, ``adaptive`` or ``block``
    combined with other options, and, as the Loader is made, for a cache that does not hold two
    blocks, or a ``window`` of more than 1.5 times as many accesses as it has room for samples.
    Source: Stoker's own; a cache that knows the plan is that of NoPFS (SC 2021).
    """
    if (prune != 0) + adaptive + (importance or repeat != 1) + (block != 1) > 1:
        raise ConfigError(
            f"repeat={repeat}, importance={importance}, prune={prune}, adaptive={adaptive}, "
            f"block={block} exclude each other: prune, adaptive and block choose samples, or their "
            "order, in their own way, give each alone"
        )
    if block != 1:
        useless = {"static": static, "request_bytes": request_bytes}
        useless |= {"uniform_part": uniform_part, "min_ess": min_ess}
        return _in_blocks(block, window, useless)
    shaped = {name: v for name, v in (("window", window), ("static", static)) if v is not None}
    if shaped and (importance or repeat == 1):
        told = ", ".join(f"{name}={value}" for name, value in shaped.items())
        raise ConfigError(
            f"{told} has no effect with repeat={repeat}, importance={importance}: give repeat=2 or "
            "more, and no importance"
        )
    if static is not None and not 0 <= static <= 1:
        raise ConfigError(f"static={static} is out of range: give a share of the cache, 0 to 1")
    given = {"uniform_part": uniform_part, "min_ess": min_ess}
    bounds = {name: value for name, value in given.items() if value is not None}
    if bounds and not importance:
        told = ", ".join(f"{name}={value}" for name, value in bounds.items())
        raise ConfigError(
            f"{told} has no effect without importance=True: nothing is drawn by importance"
        )
    bounds["annealed"] = annealed
    sampler: SamplerFactory = part(windowed, repeat=repeat, annealed=annealed, **shaped)
    if importance:
        sampler = part(ImportanceSampler, repeat=repeat, **bounds)
    elif prune:
        sampler = part(InfoBatchSampler, prune=prune, delta=1 - annealed, keeps_sum=False)
    elif adaptive:
        sampler = part(AdaptiveSampler, annealed=annealed)
    is_exact = not (importance or prune or adaptive)
    is_uniform = is_exact and repeat == 1
    once = 1e7 if request_bytes is None else request_bytes
    repeated = 0.0 if request_bytes is None else request_bytes
    policy: NextUse = NextUse(repeated)
    if is_uniform:
        policy = OnceAnEpoch(once)
    elif is_exact or adaptive:
        policy = AsPlanned(once, repeated_bytes=repeated)
    return Recipe(
        "foresight",
        "evicts what the plan needs last, or is large; samples may repeat, or be drawn unbiased",
        policy=policy,
        sampler=sampler,
        fit_sampler=fitted if adaptive or (is_exact and not is_uniform) else None,
        limit=part(hit_ratio, repeat=repeat, window=window) if is_exact else None,
    )


def _in_blocks(block: int, window: float | None, useless: dict[str, float | None]) -> Recipe:
    """Return the recipe of blocks: by any other rule their samples would go before their turn."""
    check_blocks(block, window)
    if told := ", ".join(f"{name}={value}" for name, value in useless.items() if value is not None):
        raise ConfigError(f"{told} has no effect with block={block}: leave it out")
    return Recipe(
        "foresight",
        "reads blocks of adjacent samples at once, shuffled over a window in the cache",
        policy=NextBlock(),
        sampler=part(blockwise, block=block, window=window),
        fit_sampler=fitted,
    )


def blockwise(
    num_samples: int,
    *,
    seed: int,
    shuffle: bool,
    pad_to: int,
    drop_last: bool,
    epochs: int | None,
    block: int,
    window: float | None = None,
    room: Room | None = None,
) -> BlockSampler:
    """Return the sampler of blocks, with the window that goes with ``room`` unless it is given.

    The rest is what :class:`~stoker.recipes.base.SamplerFactory` is told.
    """
    chosen = fit_window(room, block, window) if shuffle else 1.0
    parts = {} if room is None else {"breaks": room.breaks}
    return BlockSampler(
        num_samples, seed, shuffle, pad_to, drop_last, block=block, window=chosen, **parts
    )


def windowed(
    num_samples: int,
    *,
    seed: int,
    repeat: int,
    room: Room | None = None,
    window: float | None = None,
    static: float | None = None,
    **job: Any,
) -> SuperEpochSampler:
    """Return the sampler of ``repeat`` visits within windows, as they are chosen for ``room``.

    ``job`` is what :class:`~stoker.recipes.base.SamplerFactory` is told besides, and ``annealed``.
    """
    chosen = unfitted(num_samples, repeat, window)
    if room is not None:
        chosen = room.fit(repeat, seed, window, static)
    return SuperEpochSampler(
        num_samples, seed, repeat=repeat, window=chosen.window, static=chosen.static, **job
    )


def fitted(sampler: SamplerFactory, room: Room) -> SamplerFactory:
    """Return ``sampler``, a part of :func:`foresight`'s, for a cache of this size."""
    return part(sampler, room=room)


def hit_ratio(cache_fraction: float, repeat: int = 1, window: float | None = None) -> float:
    """Return the hit ratio to expect within super-epochs of samples of one size.

    Each sample is read once in R epochs, but for those that windows of the next super-epoch find
    in the cache. Longer windows than the cache holds hit as much less.
    """
    if repeat == 1 or cache_fraction <= 0:
        return max(0.0, cache_fraction)
    if cache_fraction >= 1:
        return 1.0
    hits = 1 - (1 - cache_fraction / repeat) / repeat
    if window is not None:
        hits *= min(1.0, cache_fraction * repeat / window)
    return max(hits, cache_fraction)

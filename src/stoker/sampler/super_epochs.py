"""Each sample R times in R epochs: super-epochs, and those that storage makes necessary."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler.base import Sampler
from stoker.sampler.draws import annealed_from, generator, shuffle
from stoker.sampler.uniform import EpochSampler, UniformSampler, repeated
from stoker.scores import Scores
from stoker.shared import SharedArray

WARM_UP = 2
"""Uniform epochs of an :class:`AdaptiveSampler` at the start: the first fills the cache, the second
shows what it hits."""

BLOCK = 4
"""Epochs between two of its decisions at least; whole super-epochs."""

MOST = 8
"""Its largest R."""


@dataclass(frozen=True)
class SuperEpochSampler(UniformSampler):
    """Each sample exactly ``repeat`` times in as many epochs, within a window that slides.

    A cache reads a sample once and serves its other visits, as far as these are close enough: they
    fall at equal distances, R of them in ``window`` epochs, and are shuffled among those close by.
    At any moment a share L/R of the samples is in the middle of its window: a cache that has room
    for them reads each once in R epochs. The samples ``static`` come once in each epoch instead,
    and are worth a place in the cache for good.

    Each sample is visited equally often in a super-epoch, so gradients are unbiased without
    weights. Within an epoch, :attr:`apart` accesses or more lie between two visits of a sample.
    Samples begin their windows in a random order, a new one in each super-epoch, but for the last
    of them: their windows reach into the next super-epoch, so that they are the last in each.

    Epochs are as long as the uniform sampler's. The last super-epoch is as short as what is left
    of the training, and ends with each sample visited exactly once an epoch of it. With one epoch
    left, or ``repeat=1``, this is the uniform sampler. Where the number of samples is no multiple
    of ``pad_to``, each epoch is padded to one, or cut with ``drop_last``, so that a few samples
    come more often, or less. Frozen and pure: safe in any thread or process. Source: Stoker's own.

    Raises :class:`~stoker.errors.ConfigError` for what :class:`UniformSampler` refuses, a
    ``repeat`` or ``epochs`` below 1, a negative ``warm_up``, and shares and windows out of range.
    """

    repeat: int = 2
    """R: epochs in a super-epoch, and visits of each sample in it."""
    epochs: int | None = None
    """Epochs of the whole training; None when not known, and then there is no annealed end."""
    annealed: float = 0.125
    """Share of the training, at its end, with each sample once an epoch, 0 to 1. Rounded up to
    whole epochs: without it the samples visited last are unlike those visited long ago."""
    warm_up: int = 0
    """Epochs at the start with each sample once, before the first super-epoch."""
    window: float = 1.0
    """L: epochs that R visits of a sample take, above 0. More than R counts as R."""
    static: NDArray[np.uint32] | None = field(default=None, compare=False, repr=False)
    """``u32[S]``, distinct samples that come once in each epoch; None: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeat < 1:
            raise ConfigError(f"repeat={self.repeat} is out of range: give 1 epoch or more")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs={self.epochs} is out of range: give at least 1, or None")
        if self.warm_up < 0:
            raise ConfigError(f"warm_up={self.warm_up} is out of range: give 0 epochs or more")
        if not 0 <= self.annealed <= 1:
            raise ConfigError(f"annealed={self.annealed} is out of range: give a share from 0 to 1")
        if not 0 < self.window < math.inf:
            raise ConfigError(f"window={self.window} is out of range: give epochs, above 0")

    @property
    def apart(self) -> int | None:
        """Least accesses from a visit of a sample to its next one in the same epoch."""
        if self.repeat == 1 or not self.shuffle:
            return None
        mixed = self.num_samples - (0 if self.static is None else len(self.static))
        if not mixed:
            return None
        share = self.window / self.repeat
        super_epochs = range(2, self.repeat + 1)  # the last one may be short
        return min(Windows.of(mixed, epochs, share).apart for epochs in super_epochs)

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, from 0; ``scores`` are not looked at.

        Raises :class:`~stoker.errors.ConfigError` for a negative epoch.
        """
        begin, epochs = self._super_epoch(epoch)
        if epochs == 1:
            return super().plan(scores, epoch)
        own = self._visits(begin, epochs, epoch)
        ids = SharedArray.create(self.longest, np.uint32, name="plan.ids")
        ids.array[:] = repeated(own, self.longest)
        return Plan(epoch, epoch * self.longest, ids, repeats=True)  # type: ignore[arg-type]

    def began(self, epoch: int) -> int:
        """Return the epoch with which the super-epoch of ``epoch`` begins."""
        return self._super_epoch(epoch)[0]

    def _visits(self, begin: int, epochs: int, epoch: int) -> NDArray[np.uint32]:
        """Return u32[N], the visits of an epoch of the super-epoch that starts at ``begin``."""
        is_mixed = np.ones(self.num_samples, np.bool_)
        if self.static is not None:
            is_mixed[self.static] = False
        mixed = np.flatnonzero(is_mixed).astype(np.uint32)
        if not len(mixed):
            return super().plan(None, epoch).ids[: self.num_samples]
        windows = Windows.of(len(mixed), epochs, self.window / self.repeat)
        # The same samples are last in each super-epoch, so that windows continue in the next.
        shuffle(mixed, generator(self.seed, 0, stream=4))
        shuffle(mixed[: len(mixed) - windows.crossing], generator(self.seed, begin, stream=2))
        visits = mixed[windows.visits(epoch - begin, self.seed, begin)]
        if self.static is None:
            return visits
        own = np.empty(self.num_samples, np.uint32)
        rng = generator(self.seed, epoch, stream=5)
        shuffle(is_mixed, rng)  # from here on: which accesses are theirs
        own[is_mixed] = visits
        own[~is_mixed] = rng.permutation(self.static)
        return own

    def _super_epoch(self, epoch: int) -> tuple[int, int]:
        """Return where the super-epoch of ``epoch`` begins, and how many epochs it has."""
        if epoch < 0 or not self.shuffle:
            return epoch, 1
        return super_epoch(epoch, self.repeat, self.epochs, self.annealed, self.warm_up)


def super_epoch(
    epoch: int, repeat: int, epochs: int | None, annealed: float, warm_up: int
) -> tuple[int, int]:
    """Return where the super-epoch of ``epoch`` begins, and how many epochs it has.

    They have ``repeat`` each, the last one what is left before the annealed end of a training of
    ``epochs``. The epochs of that end, and of the warm-up, stand alone.
    """
    if epoch < warm_up:
        return epoch, 1
    begin = epoch - (epoch - warm_up) % repeat
    if epochs is None:
        return begin, repeat
    mixed = annealed_from(epochs, annealed)
    if epoch >= mixed:
        return epoch, 1
    return begin, min(repeat, mixed - begin)


class Choice(NamedTuple):
    """How epochs are drawn from one decision to the next."""

    begin: int
    """The epoch with which this begins."""
    repeat: int = 1
    """R; 1: each sample once an epoch."""
    window: float = 0.0
    """L, epochs; 0 without repeats."""

    @property
    def end(self) -> int:
        """The epoch of the next decision."""
        return self.begin + self.repeat * -(-BLOCK // self.repeat)

    @property
    def name(self) -> str:
        """What is done, in words."""
        if self.repeat == 1:
            return "each sample once an epoch"
        return (
            f"each sample {self.repeat} times in {self.repeat} epochs, "
            f"within windows of {self.window:.2g}"
        )


@dataclass(frozen=True)
class AdaptiveSampler(EpochSampler):
    """Uniform epochs while storage keeps up, and else the least repeats that it can feed.

    Training reports after each epoch what storage supplied, as a share of what it took itself, and
    what hit; both stand in the history of the scores. Where the supply s was less than the misses,
    the smallest R is taken with which 1 - (1 - c1) / R of the accesses hit, 1 - s or more, c1 being
    the share of static samples; and then the longest windows for which that holds, if hits fall as
    their length grows. That is cautious: they fall less. If it still is too little, windows
    become as short as fits the cache, and then R grows by one, up to :data:`MOST`; it never falls.

    A plan stays a pure function of scores and epoch: no clock is read here. The last share
    ``annealed`` of the training is full passes. Source: Stoker's own.

    Raises :class:`~stoker.errors.ConfigError` as its base does, and for shares out of range.
    """

    room: Room | None = field(default=None, kw_only=True)
    """The cache, which windows are chosen for; None: one for a fifth of the data."""
    annealed: float = field(default=0.125, kw_only=True)
    """Share of the training, at its end, in full passes, 0 to 1."""
    tolerance: float = field(default=0.03, kw_only=True)
    """Share of accesses that storage may fall short by before more is done, 0 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tolerance <= 1:
            raise ConfigError(
                f"tolerance={self.tolerance} is out of range: give a share from 0 to 1"
            )
        self._sampler(Choice(WARM_UP))  # raises what it raises

    def choice_at(self, scores: Scores | None, epoch: int) -> Choice:
        """Return how ``epoch`` is drawn, from the history of the epochs before it."""
        if scores is None or not self._adapts_at(epoch):
            return Choice(epoch)
        found = self._decided(Choice(WARM_UP), scores)
        while found.end <= epoch:
            found = self._decided(found._replace(begin=found.end), scores)
        return found

    def describe(self, scores: Scores | None, epoch: int) -> str:
        """Return in one line what is done in ``epoch``, and why."""
        name = self.choice_at(scores, epoch).name
        known = scores is not None and np.isfinite(scores.supplies[:epoch]).any()
        if scores is None or not known:
            return f"{name}: what storage supplies is not known yet"
        last = scores.supplies[:epoch]
        supply = float(last[np.isfinite(last)][-1])
        return f"{name}: storage supplied {supply:.0%} of what training takes"

    # --- the protocol ---

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return a full pass, whatever is chosen."""
        return self.longest

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, as chosen; errors are those of its sampler."""
        return self._sampler(self.choice_at(scores, epoch)).plan(None, epoch)

    def foresees(self, scores: Scores | None, epoch: int) -> bool:
        """Whether it is decided how ``epoch`` is drawn."""
        if not self._adapts_at(epoch):
            return True
        return scores is not None and self.choice_at(scores, epoch).begin < epoch

    # --- inside ---

    def _adapts_at(self, epoch: int) -> bool:
        is_over = self.epochs is not None and epoch >= annealed_from(self.epochs, self.annealed)
        return self.shuffle and epoch >= WARM_UP and not is_over

    def _decided(self, now: Choice, scores: Scores) -> Choice:
        """Return ``now``, or more than it where storage fell short in the epochs before."""
        before = slice(max(1, now.begin - BLOCK), now.begin)  # the cache is filled in the first
        supplies, hits = scores.supplies[before], scores.hit_ratios[before]
        if not np.isfinite(supplies).any() or not np.isfinite(hits).any():
            return now
        supply, missed = float(np.nanmedian(supplies)), 1 - float(np.nanmedian(hits))
        if supply + self.tolerance >= missed:
            return now
        wanted = self._least(now.begin, 1 - supply)
        if (wanted.repeat, -wanted.window) > (now.repeat, -now.window):
            return wanted
        if now.repeat > 1 and now.window > self._fit(now.repeat).window:
            return now._replace(window=self._fit(now.repeat).window)
        repeat = min(MOST, now.repeat + 1)
        return Choice(now.begin, repeat, self._fit(repeat).window)

    def _least(self, begin: int, hits: float) -> Choice:
        """Return the least that is expected to hit so often; the most there is if none is."""
        for repeat in range(2, MOST + 1):
            fit = self._fit(repeat)
            static = 0.0 if fit.static is None else len(fit.static) / self.num_samples
            within = (1 - static) * (1 - 1 / repeat)
            if static + within >= hits:
                longer = within / max(hits - static, within / repeat)
                return Choice(begin, repeat, min(float(repeat), longer * fit.window))
        return Choice(begin, MOST, self._fit(MOST).window)

    def _fit(self, repeat: int) -> Fit:
        if repeat not in self._fits:
            if self.room is None:
                self._fits[repeat] = unfitted(self.num_samples, repeat, None)
            else:
                self._fits[repeat] = self.room.fit(repeat, self.seed)
        return self._fits[repeat]

    @cached_property
    def _fits(self) -> dict[int, Fit]:
        return {}  # each takes sorting the sizes

    def _sampler(self, choice: Choice) -> Sampler:
        is_uniform = choice.repeat == 1
        return SuperEpochSampler(
            self.num_samples,
            self.seed,
            self.shuffle,
            self.pad_to,
            self.drop_last,
            repeat=choice.repeat,
            epochs=self.epochs,
            annealed=self.annealed,
            warm_up=choice.begin,
            window=1.0 if is_uniform else choice.window,
            static=None if is_uniform else self._fit(choice.repeat).static,
        )


_UNKNOWN = 0.2  # of the data: the cache, where its size is not known
_APART = 4096  # accesses from a visit to the next at least, so that a step has no sample twice;
_APART_SHARE = 1 / 40  # or so much of an epoch if that is less,
_APART_FEW, _APART_FEW_SHARE = 128, 1 / 8  # but for few samples rather these
_STATIC = 0.5  # of the cache, where small samples stay
_GAIN = 1.25  # times as many samples in it as of mean size: else nothing is static


@dataclass(frozen=True)
class Windows:
    """Where the visits of a super-epoch fall: R tracks side by side, each a circle of M samples.

    Access q is place q // R of track q % R, and track k lies k x ``step`` places behind: so a
    sample that comes by in one track comes by in the next one ``step`` places later. A super-epoch
    is cut into ``blocks`` of all tracks, and each block shuffled. A step is two blocks or more, so
    that a whole block lies between two visits of a sample.
    """

    samples: int
    """M, 1 or more."""
    repeat: int
    """R: tracks, and epochs."""
    blocks: int
    """How many parts of a super-epoch are shuffled, each in itself."""

    @classmethod
    def of(cls, samples: int, repeat: int, share: float) -> Windows:
        """Return the windows in which a ``share`` of the samples, above 0, is at any moment."""
        # R steps go around once at most; a step is two blocks and one or two places.
        least = 2 * repeat + 1
        most = max(least, samples // 3)
        blocks = int(np.clip(round(2 * repeat / min(1.0, share)), least, most))
        return cls(samples, repeat, min(blocks, samples))

    @property
    def step(self) -> int:
        """Places from a visit of a sample to its next one, before blocks are shuffled."""
        return -(-2 * self.samples // self.blocks) + 1

    @property
    def crossing(self) -> int:
        """Samples whose windows reach into the next super-epoch."""
        return min(self.samples, (self.repeat - 1) * self.step)

    @property
    def apart(self) -> int:
        """Least accesses from a visit of a sample to its next one in the same epoch, 1 or more."""
        if self.repeat * self.step > self.samples:
            return 1  # too few samples
        return self.repeat * (self.samples // self.blocks) + 1

    def visits(self, epoch: int, seed: int, begin: int) -> NDArray[np.uint32]:
        """Return u32[M], the samples visited in ``epoch``, from 0 to R - 1, as places in an order.

        The shuffling is that of the super-epoch which starts at ``begin``.
        """
        first, end = epoch * self.samples, (epoch + 1) * self.samples
        edges = np.arange(self.blocks + 1) * self.samples // self.blocks * self.repeat
        visited, filled = np.empty(self.samples, np.uint32), 0
        since = int(np.searchsorted(edges, first, side="right")) - 1
        for block in range(since, int(np.searchsorted(edges, end))):
            accesses = np.arange(edges[block], edges[block + 1])
            shuffle(accesses, generator(seed, begin, stream=8 + block))
            own = accesses[max(0, first - edges[block]) : end - edges[block]]
            place, track = np.divmod(own, self.repeat)
            visited[filled : filled + len(own)] = (place - track * self.step) % self.samples
            filled += len(own)
        return visited


class Fit(NamedTuple):
    """Windows that go with a cache."""

    window: float
    """L, epochs."""
    static: NDArray[np.uint32] | None
    """``u32[S]``, samples that come once in each epoch; None: none."""


@dataclass(frozen=True)
class Room:
    """How much of the samples a cache holds, which windows are chosen by.

    The rule is ours. Of the cache, half holds the smallest samples for good, if these are 1.25
    times as many as samples of mean size would be; where sizes hardly differ that would gain hits
    for a smaller effective sample size, as more repeats do, and nothing is static. Windows are as
    long as the rest of the cache holds the samples that are within theirs, L/R of the other bytes.

    Raises :class:`~stoker.errors.ConfigError` for a negative capacity.
    """

    sizes: NDArray[np.int64] = field(compare=False, repr=False)
    """``i64[N]``, bytes of each sample."""
    capacity: int
    """Bytes of the cache."""
    breaks: NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64), compare=False, repr=False
    )
    """``i64[K]``, ascending: samples that no request reads together with the one before."""

    def __post_init__(self) -> None:
        if self.capacity < 0:
            raise ConfigError(f"capacity={self.capacity} is out of range: give 0 bytes or more")

    @property
    def share(self) -> float:
        """The cache's share of all bytes, 0 to 1."""
        return _share(self.capacity, int(self.sizes.sum()))

    def smallest(self, share: float, seed: int) -> NDArray[np.uint32]:
        """Return u32[S], the smallest samples, as many as fill a ``share`` of the cache.

        Of samples of one size, chance decides by ``seed`` which ones.
        """
        order = generator(seed, 0, stream=7).permutation(len(self.sizes)).astype(np.uint32)
        order = order[np.argsort(self.sizes[order], kind="stable")]
        filled = np.cumsum(self.sizes[order])
        return order[: int(np.searchsorted(filled, share * self.capacity, side="right"))]

    def fit(
        self, repeat: int, seed: int, window: float | None = None, static: float | None = None
    ) -> Fit:
        """Return windows for ``repeat`` visits; ``window`` and ``static`` as given, if they are.

        ``static`` is a share of the cache's bytes, 0 to 1.
        """
        count, total = len(self.sizes), int(self.sizes.sum())
        ids = self.smallest(_STATIC if static is None else static, seed)
        kept = int(self.sizes[ids].sum())
        if static is None:
            others, share = count - len(ids), _share(self.capacity - kept, total - kept)
            short = share < least_share(others)  # too little room, or too few to be repeated
            short = short or (others > 0 and Windows.of(others, repeat, share).apart == 1)
            if short or len(ids) * total < _GAIN * kept * count:
                ids, kept = ids[:0], 0
        if window is None:
            share = _share(self.capacity - kept, total - kept)
            window = repeat * max(share, least_share(count - len(ids)))
        return Fit(window, ids if len(ids) else None)


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole else 1.0


def unfitted(num_samples: int, repeat: int, window: float | None) -> Fit:
    """Return windows for a cache of unknown size: those of one that holds a fifth of the data."""
    if window is None:
        window = repeat * max(_UNKNOWN, least_share(num_samples))
    return Fit(window, None)


def least_share(num_samples: int) -> float:
    """Return the least share of samples within their windows that keeps visits well apart."""
    few = min(_APART_FEW, _APART_FEW_SHARE * num_samples)
    wanted = min(_APART, max(few, _APART_SHARE * num_samples))
    return min(1.0, 2 * wanted / max(1, num_samples))

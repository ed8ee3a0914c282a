"""Where the visits of a super-epoch fall, and how long windows a cache can hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.sampler.draws import generator

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
            generator(seed, begin, stream=8 + block).shuffle(accesses)
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

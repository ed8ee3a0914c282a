"""Blocks of adjacent samples, which one request reads, shuffled over a window."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler.draws import generator
from stoker.sampler.super_epochs import Room
from stoker.sampler.uniform import UniformSampler, repeated
from stoker.scores import Scores
from stoker.shared import SharedArray

_LANES = (192, 96, 48, 24, 8, 4, 2, 1)  # most numbers of ranks divide one of these
_IN_LANE = 4  # blocks that the window of a lane has at least, or their edges would show
_UNKNOWN = 0.2  # of the data: the cache, where its size is not known
_MOST = 1.5  # windows: half of one, and what is read ahead, has to fit into the cache
_NO_BREAKS = np.empty(0, np.int64)


@dataclass(frozen=True)
class BlockSampler(UniformSampler):
    """Each sample once an epoch; up to ``block`` adjacent ones fall into one window.

    The samples are cut into blocks, which come in random order, and each sample of a block at a
    random place in the ``window`` that begins with it. A cache that has room for half a window
    reads a block at once and keeps the rest of it until it is due.

    The plan is dealt out to *lanes*, access by access, and a block lies in one lane: neighbours
    are at least so many accesses apart, and ranks whose number divides that of the lanes get whole
    blocks. The number, at most 192, is such that the window of each lane has four blocks.

    The order of an epoch is that of Philox keyed by (seed, epoch). Epochs are as long, and padded
    or cut, as those of :class:`UniformSampler`. Frozen and pure: safe in any thread or process.
    Source: CorgiPile (Xu et al., SIGMOD 2022) shuffles random blocks in a buffer that is filled
    and emptied; sliding windows and lanes are Stoker's own.

    Raises :class:`~stoker.errors.ConfigError` for what :class:`UniformSampler` refuses, a
    ``block`` below 2, a window out of range, and breaks that do not ascend within the samples.
    """

    block: int = 32
    """B: samples of a block, 2 or more; the last one before a break, or the end, may be shorter."""
    window: float = 0.2
    """L: epochs over which a block is spread, above 0 to 1."""
    breaks: NDArray[np.int64] = field(default_factory=_NO_BREAKS.copy, compare=False, repr=False)
    """``i64[K]``, ascending: samples that no request reads together with the one before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_blocks(self.block, self.window)
        cuts = self.breaks
        if len(cuts) and not (
            (np.diff(cuts) > 0).all() and cuts[0] >= 0 and cuts[-1] < self.num_samples
        ):
            raise ConfigError(f"breaks must ascend from 0 to {self.num_samples - 1}: {cuts}")

    @property
    def reads_blocks(self) -> bool:
        """Whether plans have blocks: where they are shuffled."""
        return self.shuffle

    @property
    def lanes(self) -> int:
        """Streams that the plan is dealt out to, one access to each in turn."""
        room = self.window * self.num_samples / (_IN_LANE * self.block)
        return next((lanes for lanes in _LANES if lanes <= room), 1)

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, from 0, with its blocks; ``scores`` are not looked at.

        Raises :class:`~stoker.errors.ConfigError` for a negative epoch.
        """
        if not self.shuffle:
            return super().plan(None, epoch)
        order, numbers = self._dealt(epoch)
        ids = SharedArray.create(self.longest, np.uint32, name="plan.ids")
        blocks = SharedArray.create(self.longest, np.uint32, name="plan.blocks")
        ids.array[:] = repeated(order, self.longest)
        blocks.array[:] = repeated(numbers, self.longest)
        return Plan(epoch, epoch * self.longest, ids, blocks=blocks)  # type: ignore[arg-type]

    def _dealt(self, epoch: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return u32[N], the samples in order of access, and u32[N], the block of each."""
        count, lanes = self.num_samples, self.lanes
        rng = generator(self.seed, epoch)
        starts = block_starts(count, self.block, self.breaks)
        sizes = np.diff(starts, append=count)
        drawn = rng.permutation(len(starts))
        numbers = np.repeat(drawn, sizes[drawn]).astype(np.uint32)
        begins = np.cumsum(sizes[drawn]) - sizes[drawn]  # of each block drawn, in this row of all
        samples = np.arange(count) + np.repeat(starts[drawn] - begins, sizes[drawn])
        opened = np.repeat(begins, sizes[drawn])
        ids, blocks = np.empty(count, np.uint32), np.empty(count, np.uint32)
        first = 0
        for lane in range(lanes):
            places = slice(first, first + len(range(lane, count, lanes)))
            first = places.stop
            # What of a block goes over into the next lane begins with that.
            due = np.maximum(opened[places], places.start).astype(np.float64)
            due += self.window * count / lanes * rng.random(len(due))
            turn = np.argsort(due, kind="stable")
            ids[lane::lanes] = samples[places][turn]
            blocks[lane::lanes] = numbers[places][turn]
        return ids, blocks


def check_blocks(block: int, window: float | None) -> None:
    """Raise ConfigError for blocks of fewer than 2 samples, and windows that are no share."""
    if block < 2:
        raise ConfigError(f"block={block} is out of range: give 2 adjacent samples or more")
    if window is not None and not 0 < window <= 1:
        raise ConfigError(f"window={window} is out of range: give a share of an epoch, above 0")


def block_starts(num_samples: int, block: int, breaks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return i64[K], where blocks of ``block`` samples begin, one at each of ``breaks`` too."""
    runs = np.union1d(breaks, [0])
    lengths = np.diff(runs, append=num_samples)
    counts = -(-lengths // block)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts: NDArray[np.int64] = np.repeat(runs, counts) + block * within
    return starts


def fit_window(room: Room | None, block: int, window: float | None) -> float:
    """Return the window for a cache; ``window`` as given, if it is.

    The rule is ours: as many accesses as the cache has room for samples. Half of the cache then
    holds what is read and not yet due, and the other half the samples that the next epoch begins
    with. Raises :class:`~stoker.errors.ConfigError` for a cache that does not hold two
    blocks, and a window of more than 1.5 times as many accesses.
    """
    if room is None:
        return _UNKNOWN if window is None else window
    count = len(room.sizes)
    if round(room.share * count) < min(count, 2 * block):
        raise ConfigError(
            f"block={block} keeps samples in the cache until they are due, and it has room for "
            f"{room.share * count:.0f}: give it room for {2 * block}, or leave block= out"
        )
    most = min(1.0, _MOST * room.share)
    if window is not None and window > most:
        raise ConfigError(
            f"window={window} is out of range: the cache has room for {room.share:.1%} of the "
            f"samples, and half of the window has to fit into it: give at most {most:.3g}"
        )
    return room.share if window is None else window


def neighbour_distances(ids: ArrayLike) -> NDArray[np.int64]:
    """Return i64[N - 1], the accesses between samples i and i + 1 in a plan, 1 or more.

    ``ids`` [N] are all samples from 0 to N - 1, each once. In a uniform permutation the distances
    average N / 3; in one of :class:`BlockSampler` a third of the window, within blocks.
    """
    order = np.asarray(ids)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    distances: NDArray[np.int64] = np.abs(np.diff(place))
    return distances

"""What the cache gains a job, from loops over a storage whose rate is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from stoker.jobs.gain import Block, PassiveGain, Probe

BATCH = 100  # samples
LONG = 200  # batches of an epoch


class Read(NamedTuple):
    """One read that the storage served."""

    begin: float
    end: float
    samples: int
    is_ahead: bool


class Run:
    """A training loop over slow storage, in virtual time: the model that estimates are held to.

    The storage gives ``rate`` samples a second to whoever asks, first come, first served, after
    ``latency`` in which it serves others. Batch ``i`` misses ``missed[i]`` samples, which one of
    ``workers`` reads at once, or, with ``ahead``, the prefetch process in groups, so many at once.
    """

    def __init__(
        self,
        missed: Sequence[int],
        compute: float,
        rate: float,
        *,
        workers: int = 2,
        ahead: int = 0,
        latency: float = 0.0,
    ) -> None:
        self.reads: list[Read] = []
        self.stalls: list[float] = []
        self.times: list[float] = []
        """When the loop got each batch."""
        self._rate, self._latency, self._free_at = rate, latency, 0.0
        lanes = [0.0] * (ahead or workers)
        groups, drawn = (4, 6) if ahead else (1, 2 * workers)
        ready, wants = 0.0, 0.0  # when the loop asks for the next batch
        for number, misses in enumerate(missed):
            # Nobody is further ahead of the loop than so many batches.
            allowed = self.times[number - drawn] if number >= drawn else 0.0
            ends = [allowed]
            for part in np.array_split(np.arange(misses), groups):
                if len(part):
                    lane = min(range(len(lanes)), key=lanes.__getitem__)
                    begin = max(lanes[lane], allowed)
                    lanes[lane] = self._read(begin, len(part), is_ahead=bool(ahead))
                    ends.append(lanes[lane])
            ready = max(ready, *ends)  # batches come in order
            self.stalls.append(max(0.0, ready - wants))
            self.times.append(max(ready, wants))
            wants = self.times[-1] + compute

    def _read(self, begin: float, samples: int, *, is_ahead: bool) -> float:
        self._free_at = max(self._free_at, begin) + samples / self._rate
        end = max(self._free_at, begin + self._latency)
        self.reads.append(Read(begin, end, samples, is_ahead))
        return end

    def mean(self, first: int, end: int) -> float:
        """Seconds of a batch."""
        return (self.times[end - 1] - self.times[first]) / (end - 1 - first)

    def blocks(self, size: int = 20) -> Iterator[tuple[int, Block]]:
        """What a job measures of it, each with the number of its last batch."""
        for first in range(0, len(self.times) - size, size):
            last = first + size
            begin, end = self.times[first], self.times[last]
            over = [read for read in self.reads if begin < read.end <= end]
            yield (
                last,
                Block(
                    size,
                    end - begin,
                    sum(self.stalls[first + 1 : last + 1]),
                    size * BATCH,
                    sum(read.samples for read in over),
                    sum(read.end - read.begin for read in over if not read.is_ahead),
                    self._ahead_seconds(begin, end),
                ),
            )

    def _ahead_seconds(self, begin: float, end: float) -> float:
        """Seconds between the two in which something was being read ahead."""
        total, reached = 0.0, begin
        for read in sorted(read for read in self.reads if read.is_ahead):
            total += max(0.0, min(read.end, end) - max(read.begin, reached))
            reached = max(reached, min(read.end, end))
        return total


def random_hits(share: float, epochs: int, seed: int = 0) -> list[int]:
    """Misses of each batch: all in the first epoch, later all but a share, spread at random."""
    rng = np.random.default_rng(seed)
    warm = rng.binomial(BATCH, 1 - share, LONG * (epochs - 1))
    return [BATCH] * LONG + warm.tolist()


def early_hits(share: float, epochs: int) -> list[int]:
    """The same, with the hits of an epoch at its beginning, as keys of next use have them."""
    hits = int(LONG * share)
    return [BATCH] * LONG + ([0] * hits + [BATCH] * (LONG - hits)) * (epochs - 1)


@pytest.mark.parametrize("ahead", [4, 0])
@pytest.mark.parametrize(
    ("compute", "missed"),
    [
        (0.01, random_hits(0.2, 5)),  # bound by the storage: 1.25
        (0.01, random_hits(0.6, 5)),  # 2.5
        (0.082, random_hits(0.2, 5)),  # was, and the cache makes up for it: 1.22
        (0.04, random_hits(0.8, 5)),  # and with room to spare: 2.5
        (0.15, random_hits(0.5, 5)),  # bound by computing, whatever the cache does: 1
        (0.01, random_hits(0.0, 5)),  # there is no hit: 1
        (0.04, early_hits(0.2, 5)),
        (0.04, early_hits(0.6, 5)),
    ],
)
def test_s4_the_estimate_is_right_and_stays_so(
    compute: float, missed: list[int], ahead: int
) -> None:
    rate = 1000.0
    run = Run(missed, compute, rate, ahead=ahead)
    without = Run([BATCH] * len(missed), compute, rate, ahead=ahead)
    passive = PassiveGain()
    seen = []
    for last, block in run.blocks():
        if last % LONG == 20:
            passive.begin_epoch()
        passive.add(block)
        if last >= 2 * LONG:
            now = max(LONG, last - LONG), last
            seen.append(passive.gain / (without.mean(*now) / run.mean(*now)))
    assert len(seen) > 20
    assert seen == pytest.approx(np.ones(len(seen)), rel=0.1)


def test_s4_it_only_rises_as_a_cache_fills() -> None:
    shares = np.repeat([0.0, 0.2, 0.4, 0.6, 0.6, 0.6], LONG)
    run = Run((BATCH * (1 - shares)).astype(int).tolist(), 0.01, 1000.0, ahead=4)
    passive, gains = PassiveGain(), []
    for last, block in run.blocks():
        if last % LONG == 20:
            passive.begin_epoch()
        passive.add(block)
        gains.append(passive.gain)
    assert (np.diff(gains) > -0.05).all()
    assert gains[0] == pytest.approx(1.0, abs=0.05)
    assert gains[-1] == pytest.approx(2.5, rel=0.05)


def test_reads_that_need_company_are_no_sign_of_slow_storage() -> None:
    """What waits for a long answer now and then, and never had the loop wait, gains nothing."""
    run = Run(random_hits(0.7, 4), 0.1, 1e6, ahead=16, latency=0.05)
    passive = PassiveGain()
    for _, block in run.blocks():
        passive.add(block)
    assert passive.gain == pytest.approx(1.0, abs=0.02)


def test_a_loop_that_waits_for_its_workers_does_not_wait_for_storage() -> None:
    # Of .1 s a batch the loop waits .09 s, for decoding: the storage is at work for .01 s of them.
    passive = PassiveGain()
    for _ in range(10):
        passive.add(Block(20, 2.0, 1.8, 20 * BATCH, 10 * BATCH, 0.0, 0.2))
    assert passive.gain == 1.0
    assert passive.fetch_seconds == pytest.approx(0.02)
    assert passive.compute_seconds == pytest.approx(0.01)


def test_without_misses_nothing_is_known_and_nothing_is_claimed() -> None:
    passive = PassiveGain()
    assert (passive.gain, passive.fetch_seconds, passive.compute_seconds) == (1.0, 0.0, 0.0)
    passive.add(Block(20, 2.0, 0.0, 2000, 0, 0.0, 0.0))
    passive.add(Block(0, 0.0, 0.0, 0, 0, 0.0, 0.0))
    assert passive.gain == 1.0


def test_it_remembers_one_epoch_and_no_more() -> None:
    passive = PassiveGain()
    passive.begin_epoch()
    for _ in range(10):
        passive.add(Block(20, 20.0, 18.0, 2000, 2000, 0.0, 20.0))
    for _ in range(3):
        passive.begin_epoch()
        for _ in range(10):
            passive.add(Block(20, 10.0, 8.0, 2000, 1000, 0.0, 10.0))
        assert passive.gain == pytest.approx(2.0)
    blocks: deque[Block] = passive._blocks
    assert len(blocks) == 10


def test_a_probe_compares_batches_without_and_with_the_cache() -> None:
    probe = Probe(3)
    assert probe.is_over
    for _ in range(2):  # in each epoch anew
        probe.begin(100)
        assert probe.count == 3
        times = [0.0, 4.0, 8.0, 9.0, 10.0, 11.0]  # 4 s a batch without, 1 s with it
        assert [probe.add(at) for at in times] == [None] * 5 + [4.0]
        assert probe.is_over
        assert probe.add(12.0) is None


def test_a_probe_is_shorter_in_a_short_epoch() -> None:
    probe = Probe(20)
    counts = []
    for batches in (1000, 40, 39, 5, 4, 3, 0):
        probe.begin(batches)
        counts.append(probe.count)
    assert counts == [20, 20, 19, 2, 2, 0, 0]
    assert probe.is_over

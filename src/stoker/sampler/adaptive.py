"""As many repeats, in as short windows, as storage makes necessary."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler.base import Sampler
from stoker.sampler.draws import annealed_from
from stoker.sampler.epoch import EpochSampler
from stoker.sampler.uniform import SuperEpochSampler
from stoker.sampler.windows import Fit, Room, unfitted
from stoker.scores import Scores

WARM_UP = 2
"""Uniform epochs at the start: the first fills the cache, the second shows what it hits."""

BLOCK = 4
"""Epochs between two decisions at least; whole super-epochs."""

MOST = 8
"""Largest R."""


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

"""As many repeats, and as much importance, as storage makes necessary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler.base import Sampler
from stoker.sampler.draws import annealed_from
from stoker.sampler.epoch import EpochSampler
from stoker.sampler.importance import ImportanceSampler
from stoker.sampler.uniform import SuperEpochSampler
from stoker.scores import Scores


class Level(NamedTuple):
    """One way to draw, and the share of accesses that hits beyond the cache's share."""

    name: str
    repeat: int
    by_importance: bool
    gain: float


LEVELS = (
    Level("each sample once an epoch", 1, False, 0.0),
    Level("each sample twice in 2 epochs", 2, False, (1 - 1 / 2) ** 2),
    Level("each sample 4 times in 4 epochs", 4, False, (1 - 1 / 4) ** 4),
    Level("by importance, 4 epochs at once", 4, True, 1.0),
)
"""From what changes least to what storage needs at most; the gain of repeats is (1 - 1/R)^R."""

WARM_UP = 2
"""Uniform epochs at the start: the first fills the cache, the second shows what it hits."""

BLOCK = 4
"""Epochs between two decisions."""


@dataclass(frozen=True)
class AdaptiveSampler(EpochSampler):
    """Uniform epochs while storage keeps up, and else the first of :data:`LEVELS` that it can feed.

    Training reports after each epoch what storage supplied, as a share of what it took itself, and
    what hit; both stand in the history of the scores. Every four epochs the level rises to the
    first one whose expected misses, 1 - c - (1 - 1/R)^R, storage can deliver, c being what hit in
    uniform epochs; it never falls. A plan stays a pure function of scores and epoch: no clock is
    read here. The last share ``annealed`` of the training is full passes. Source: Stoker's own.

    Raises :class:`~stoker.errors.ConfigError` as its base does, and for shares out of range.
    """

    uniform_part: float = field(default=0.2, kw_only=True)
    """See :class:`ImportanceSampler`."""
    min_ess: float = field(default=0.7, kw_only=True)
    """See :class:`ImportanceSampler`."""
    annealed: float = field(default=0.125, kw_only=True)
    """Share of the training, at its end, in full passes, 0 to 1."""
    tolerance: float = field(default=0.03, kw_only=True)
    """Share of accesses that storage may fall short by before the level rises, 0 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tolerance <= 1:
            raise ConfigError(
                f"tolerance={self.tolerance} is out of range: give a share from 0 to 1"
            )
        for level in LEVELS:  # raises what they raise
            self._sampler(level)

    def level_at(self, scores: Scores | None, epoch: int) -> Level:
        """Return how ``epoch`` is drawn, from the history of the epochs before it."""
        is_over = self.epochs is not None and epoch >= annealed_from(self.epochs, self.annealed)
        if scores is None or is_over or not self.shuffle:
            return LEVELS[0]
        found = 0
        for begin in range(WARM_UP, epoch + 1, BLOCK):
            since = max(1, begin - BLOCK)  # not the first epoch, which the cache is filled in
            supplies, hits = scores.supplies[since:begin], scores.hit_ratios[1:WARM_UP]
            if np.isfinite(supplies).any() and np.isfinite(hits).any():
                found = max(found, self._needed(float(np.nanmedian(supplies)), float(hits[0])))
        return LEVELS[found]

    def describe(self, scores: Scores | None, epoch: int) -> str:
        """Return in one line what is done in ``epoch``, and why."""
        level = self.level_at(scores, epoch)
        known = scores is not None and np.isfinite(scores.supplies[:epoch]).any()
        if scores is None or not known:
            return f"{level.name}: what storage supplies is not known yet"
        last = scores.supplies[:epoch]
        supply = float(last[np.isfinite(last)][-1])
        return f"{level.name}: storage supplied {supply:.0%} of what training takes"

    # --- the protocol ---

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return a full pass, whatever the level."""
        return self.longest

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, as the level has it; errors are those of its sampler."""
        return self._sampler(self.level_at(scores, epoch)).plan(scores, epoch)

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Let the sampler of this level keep what its epochs are drawn from."""
        self._sampler(self.level_at(scores, epoch)).begin_epoch(scores, epoch)

    def foresees(self, scores: Scores | None, epoch: int) -> bool:
        """Whether the level of ``epoch`` is decided, and what it draws."""
        if self.epochs is not None and epoch >= annealed_from(self.epochs, self.annealed):
            return True
        if scores is None or epoch < WARM_UP or (epoch - WARM_UP) % BLOCK == 0:
            return epoch < WARM_UP
        return self._sampler(self.level_at(scores, epoch)).foresees(scores, epoch)

    # --- inside ---

    def _needed(self, supply: float, hits: float) -> int:
        """Return the number of the first level that misses no more than ``supply``."""
        for number, level in enumerate(LEVELS):
            if 1 - hits - level.gain <= supply + self.tolerance:
                return number
        return len(LEVELS) - 1

    def _sampler(self, level: Level) -> Sampler:
        own: dict[str, Any] = {
            **{name: getattr(self, name) for name in _JOB},
            "repeat": level.repeat,
            "annealed": self.annealed,
            "warm_up": WARM_UP,
        }
        if not level.by_importance:
            return SuperEpochSampler(**own)
        return ImportanceSampler(**own, uniform_part=self.uniform_part, min_ess=self.min_ess)


_JOB = ("num_samples", "seed", "shuffle", "pad_to", "drop_last", "epochs")

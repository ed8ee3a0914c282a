"""A job's part at a shared cache: what it wants of the others, its pace, position and gain."""

from __future__ import annotations

import hashlib
import math
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.jobs.board import SLOTS, JobTable, Kind
from stoker.jobs.gain import Block, HeldBack, PassiveGain, Probe
from stoker.jobs.merged import Merged, kind_of
from stoker.jobs.metrics import PUBLISHED
from stoker.jobs.partition import Partition
from stoker.node.bandwidth import LEAST_WEIGHT, MOST_WEIGHT
from stoker.plan import Plan

_T = TypeVar("_T")
LONGEST_NAME = 64
"""Bytes of a job's name in UTF-8."""

_EVERY = 1.0  # seconds between two publications of the counts
_BLOCK = 20  # batches between two looks at the counters
_SOON = 1.0  # seconds after which it is looked at the pace
_NEW = 0.5  # weight of the latest measurement of the pace
_LAUNCHERS = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "RAY_JOB_ID",
)


@dataclass(frozen=True)
class Sharing:
    """How a job shares the cache of its data set with other jobs of this node.

    Raises :class:`~stoker.errors.ConfigError` for values out of range.
    """

    name: str = ""
    """The job's name in ``stoker ls``; by default its recipe and process."""
    merge: bool = True
    """Whether samples are kept for all jobs together; False: each job writes its own keys."""
    probe: int = 0
    """Batches without the cache, and as many with it, by which the gain is measured at the start of
    each epoch, fewer where it is short; nothing is read ahead meanwhile. iCache uses 20. 0: it is
    estimated from what is measured anyway."""
    eligible_from: float = 1.5
    """Gain from which the scores of a job count, 1 or more (iCache, HPCA 2023)."""
    weight: float = 1.0
    """The job's share of what ``stoker serve`` limits for all jobs of the user is this / the sum of
    the weights of those that want more than they have; above 0."""

    wait: float = 0.0
    """Seconds to wait until ``stoker serve`` has room for the cache that was asked for; then a
    smaller one is used."""
    by_weight: bool = False
    """Whether this job's samples have a part of the cache's memory by its weight, in place of one
    order for all jobs. For recipes with one region, without a disk cache."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or len(self.name.encode()) > LONGEST_NAME:
            raise ConfigError(
                f"name={self.name!r} is invalid: give text of at most {LONGEST_NAME} bytes"
            )
        if isinstance(self.probe, bool) or not isinstance(self.probe, int) or self.probe < 0:
            raise ConfigError(f"probe={self.probe!r} is invalid: give a number of batches, 0 or up")
        if self.probe == 1:
            raise ConfigError("probe=1 is invalid: give 2 batches or more, or 0 for none")
        if not (math.isfinite(self.eligible_from) and self.eligible_from >= 1):
            raise ConfigError(f"eligible_from={self.eligible_from!r} is invalid: give 1 or more")
        if not (math.isfinite(self.wait) and self.wait >= 0):
            raise ConfigError(f"wait={self.wait!r} is invalid: give seconds, 0 or more")
        if not isinstance(self.by_weight, bool):
            raise ConfigError(f"by_weight={self.by_weight!r} is invalid: give True or False")
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ConfigError(
                f"weight={self.weight!r} is invalid: give {LEAST_WEIGHT} to {MOST_WEIGHT:,}"
            )


class Member:
    """One process of a job in the table of those that share its cache.

    ``policy`` learns of the table, and gives merged keys from then on; ``partition`` is told of
    batches. Used by the training
    thread. Training does not depend on it: a failure only makes keys worse.
    """

    def __init__(
        self,
        table: JobTable,
        policy: Merged,
        sharing: Sharing,
        *,
        token: int,
        name: str,
        partition: Partition | None = None,
    ) -> None:
        self._table, self._policy = table, policy
        self._board, self._partition = table.board, partition
        self.counted: Callable[[], Mapping[str, Any]] = dict
        """Returns :meth:`Store.totals` of the job's; nothing is measured without them."""
        self._passive = PassiveGain()
        self.probe = Probe(sharing.probe)
        """Measures the gain, if that was requested."""
        self.was_shared = False
        """Whether other jobs have been there since the epoch began."""
        kind = kind_of(policy.policy) if sharing.merge else Kind.NONE
        slot = table.take(token, kind, sharing.name or name, sharing.eligible_from)
        self._slot = slot
        self._token = token
        self._plan: Plan | None = None
        self._length = 0  # accesses of the whole job in the epoch
        self._is_aside = False
        self._others: tuple[int, ...] = ()
        self._seen: tuple[NDArray[np.int64] | None, tuple[int, ...]] = None, ()
        self._published = -math.inf
        self._batches = 0
        self._at: tuple[float, int] = 0.0, 0
        self._stalled = 0.0
        self._paced = False  # whether the pace was measured for long enough
        self._since: tuple[float, Mapping[str, Any]] | None = None
        if slot is None:
            warnings.warn(
                f"{SLOTS} processes share this cache, the most that can cooperate: this one keeps "
                "samples by its own keys, which the others ignore. Run fewer at a time, or start a "
                "job with STOKER_NODE set to a name, which gives it a separate cache",
                RuntimeWarning,
                stacklevel=6,
            )
        elif sharing.merge:
            policy.share(table.board, slot)

    @property
    def arranges(self) -> bool:
        """Whether this job divides the cache and moves samples: the first job does."""
        owners = self._board.owners()
        return not len(owners) or int(self._board.jobs["token"][owners[0]]) == self._token

    @property
    def others(self) -> tuple[int, ...]:
        """The other jobs that are there, by their tokens."""
        owners = self._board.owners()
        if owners is not self._seen[0]:  # the board gives new ones when anything has changed
            tokens = self._board.jobs["token"][owners].tolist()
            self._seen = owners, tuple(token for token in tokens if token != self._token)
        return self._seen[1]

    def begin_epoch(
        self, plan: Plan | None, length: int, batches: int = 0, *, is_aside: bool = False
    ) -> None:
        """Publish when samples are needed, from the rest of an epoch of ``length`` accesses.

        None if only the user's sampler knows the order. ``batches`` of this process may
        serve for a probe. ``is_aside``: this job reads past the cache for now, so that nothing is
        to be kept for it.
        """
        self._plan, self._length, self._others = plan, length, self.others
        self._is_aside = is_aside
        self.was_shared = bool(self._others)
        self._since, self._batches, self._stalled = None, 0, 0.0
        self._passive.begin_epoch()
        self.probe.begin(0 if self._slot is None else batches)
        if self._slot is not None and plan is not None:
            self._at = self._board.clock(), plan.start
            self._publish(plan)

    def received(
        self, positions: NDArray[np.int64], stall_seconds: float, *, is_aside: bool = False
    ) -> bool:
        """Note that the loop got the plan's accesses at ``positions``, i64[n].

        ``stall_seconds``: for how long it waited for them; ``is_aside`` as in :meth:`begin_epoch`.

        Returns whether jobs came or went since the last call, or this one came back to the cache:
        then all keys must be rewritten.
        """
        if self._partition is not None:
            self._partition.seen()
        if self._slot is None:
            return False
        is_back, self._is_aside = self._is_aside and not is_aside, is_aside
        if is_aside:
            self._note_aside(positions)
            return False
        if is_back and self._plan is not None:
            self._publish(self._plan)
        now = self._board.clock()
        if self._plan is not None and len(positions):
            row = self._board.jobs[self._slot]
            position = self._plan.start + int(positions.max()) + 1
            row["position"], row["noted"] = position, now
            self._policy.pass_by(self._plan, positions[positions < len(self._plan)])
            self._measure_pace(now, position)
        self._stalled += stall_seconds
        self._measure_gain(now)
        others = self.others
        changed, self._others = others != self._others, others
        self.was_shared = self.was_shared or bool(others)
        return changed or is_back

    @property
    def is_due(self) -> bool:
        """Whether :meth:`publish` was last called a second ago or more."""
        return self._slot is not None and self._board.clock() - self._published >= _EVERY

    def publish(self, counts: Mapping[str, float], waits: Sequence[int]) -> None:
        """Show others the ``counts`` of :data:`PUBLISHED`, and the buckets of batch ``waits``."""
        if self._slot is None:
            return
        row = self._board.jobs[self._slot]
        for name in PUBLISHED:
            row[name] = counts[name]
        row["waits"] = waits
        self._published = self._board.clock()

    @property
    def _is_first(self) -> bool:
        """Whether this is the job's first rank here: it represents all of them."""
        return self._slot in self._board.owners()

    def held_back(self, arriving: Iterator[_T]) -> Iterator[_T]:
        """Return batches as they are, but held back for a while when a probe is wanted."""
        if self._slot is None:
            return arriving
        return HeldBack(arriving, self._board.jobs[self._slot], self._board.clock)

    def close(self) -> None:
        """Leave the table; may be called again."""
        self._slot = None
        if self._partition is not None:
            self._partition.close()
        self._table.close()

    def _publish(self, plan: Plan) -> None:
        """Publish when this job needs samples next; one of its ranks is enough."""
        if not self._is_first:
            return
        if self._is_aside:
            self._policy.withdraw()
        else:
            self._policy.begin_plan(plan, self._length)

    def _note_aside(self, positions: NDArray[np.int64]) -> None:
        """Note a batch that was read past the cache; others hear of it once in some batches."""
        self._batches += 1
        if self._batches < _BLOCK:
            return
        self._batches, self._since = 0, None
        if self._plan is not None and len(positions):
            row = self._board.jobs[self._slot]
            position = self._plan.start + int(positions.max()) + 1
            row["position"], row["noted"] = position, self._board.clock()

    def _measure_pace(self, now: float, position: int) -> None:
        began, start = self._at
        if position <= start or now <= began:
            return
        row, rate = self._board.jobs[self._slot], (position - start) / (now - began)
        if now - began < _SOON and self._paced:
            return
        if self._paced:
            rate += (1 - _NEW) * (float(row["rate"]) - rate)
        row["rate"] = rate  # a first guess is better than none
        if now - began >= _SOON:
            self._at, self._paced = (now, position), True

    def _measure_gain(self, now: float) -> None:
        row = self._board.jobs[self._slot]
        gain = self.probe.add(now)
        if gain is not None:
            row["gain"], row["is_probed"] = max(1.0, gain), 1
            self._since = None  # what was measured so far is the probe's
        self._batches += 1
        if self._since is not None and self._batches < _BLOCK:
            return
        counts = self.counted()
        if self._since is not None and self.probe.is_over and counts:
            began, before = self._since
            new = {name: count - before.get(name, 0) for name, count in counts.items()}
            self._passive.add(
                Block(
                    self._batches,
                    now - began,
                    self._stalled,
                    new["accesses"],
                    new["read"] + new["read_ahead"],
                    new["source_seconds"],
                    new["ahead_seconds"],
                )
            )
            row["fetch_seconds"] = self._passive.fetch_seconds
            row["compute_seconds"] = self._passive.compute_seconds
            if not row["is_probed"]:
                row["gain"] = self._passive.gain
        self._since, self._batches, self._stalled = (now, counts), 0, 0.0


def token_of(world_size: int, *facts: object) -> int:
    """Return a number of this job's own, not 0, the same in its ranks on this node.

    Ranks compute it without communication, as one of them may iterate alone: from what their
    launcher set, else from their parent process, and ``facts`` like seed and recipe.
    """
    if world_size == 1:
        return int(uuid.uuid4().int >> 64) | 1
    launched = [os.environ.get(name, "") for name in _LAUNCHERS]
    parent = "" if any(launched) else str(os.getppid())
    text = repr((launched, parent, world_size, facts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") | 1

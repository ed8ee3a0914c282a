"""What a sampler is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from stoker.plan import Plan
from stoker.scores import Scores


@runtime_checkable
class Sampler(Protocol):
    """Makes the plan of an epoch for the whole job.

    Pure: the same arguments give the same plan, in any process and at any time. It owns no
    clock, thread, file or global random state, so it pickles and the simulator replays it.
    """

    @property
    def length(self) -> int:
        """Accesses in every plan, for all ranks together, known at construction."""
        ...

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, counted from 0; ``len`` of it is :attr:`length`.

        ``scores`` is a snapshot, or None for samplers that do not look at scores. Raises
        :class:`~stoker.errors.ConfigError` for a negative epoch.
        """
        ...

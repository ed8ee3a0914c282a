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
    def uses_scores(self) -> bool:
        """Whether plans depend on scores, so that none can be made before its epoch begins."""
        ...

    @property
    def longest(self) -> int:
        """Accesses of the longest plan, for all ranks together, known at construction."""
        ...

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return the accesses of the plan of ``epoch``, for all ranks together.

        ``len(plan(scores, epoch)) == length_at(epoch, scores)``. Without scores: the number to
        lay out a learning-rate schedule by. A multiple of the number of ranks.
        """
        ...

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, counted from 0.

        It starts at ``epoch`` x :attr:`longest`. Made for one rank (``pad_to=1``) it is a prefix
        of the one made for several, so that an epoch resumes with another number of ranks.

        ``scores`` is a snapshot, or None for samplers that do not look at scores. Raises
        :class:`~stoker.errors.ConfigError` for a negative epoch.
        """
        ...


def begin_epoch(sampler: Sampler, scores: Scores, epoch: int) -> None:
    """Let a sampler that draws several epochs at once keep in ``scores`` what it draws them from.

    To be called when ``epoch`` begins, once the scores are what its plan is to be made from.
    """
    own = getattr(sampler, "begin_epoch", None)
    if own is not None:
        own(scores, epoch)


def foresees(sampler: Sampler, scores: Scores | None, epoch: int) -> bool:
    """Whether the plan of ``epoch`` that these scores give is the one that it will have.

    So where scores do not matter, and where a sampler's own ``foresees(scores, epoch)`` says that
    those to come do not matter any more, as in its full passes.
    """
    if not sampler.uses_scores:
        return True
    own = getattr(sampler, "foresees", None)
    return own is not None and bool(own(scores, epoch))

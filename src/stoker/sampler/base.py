"""What a sampler is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from stoker.plan import Plan
from stoker.scores import Scores
from stoker.types import check_members


class Sampler(ABC):
    """Makes the plan of an epoch for the whole job.

    Pure: the same arguments give the same plan, in any process and at any time. It owns no
    clock, thread, file or global random state, so it pickles and the simulator replays it. An
    object that has the four abstract members without deriving from this class is completed by
    :func:`as_sampler`.
    """

    @property
    @abstractmethod
    def uses_scores(self) -> bool:
        """Whether plans depend on scores, so that none can be made before its epoch begins."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Accesses of the longest plan, for all ranks together, known at construction."""

    @abstractmethod
    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return the accesses of the plan of ``epoch``, for all ranks together.

        ``len(plan(scores, epoch)) == length_at(epoch, scores)``. Without scores: the number to
        lay out a learning-rate schedule by. A multiple of the number of ranks.
        """

    @abstractmethod
    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, counted from 0.

        It starts at ``epoch`` x :attr:`longest`. Made for one rank (``pad_to=1``) it is a prefix
        of the one made for several, so that an epoch resumes with another number of ranks.

        ``scores`` is a snapshot, or None for samplers that do not look at scores. Raises
        :class:`~stoker.errors.ConfigError` for a negative epoch.
        """

    # --- with defaults ---

    @property
    def apart(self) -> int | None:
        """Least accesses from a visit of a sample to its next one in an epoch; None: by chance."""
        return None

    @property
    def reads_blocks(self) -> bool:
        """Whether plans have blocks of samples that are to be read at once."""
        return False

    @property
    def without_accuracy(self) -> str:
        """What happens to plans if no accuracy is reported; empty: nothing."""
        return ""

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Keep in ``scores`` what this and later epochs are drawn from.

        Called when ``epoch`` begins, once the scores are what its plan is to be made from; for
        samplers that draw several epochs at once.
        """

    def foresees(self, scores: Scores | None, epoch: int) -> bool:
        """Whether the plan that these scores give for ``epoch`` is the one that it will have.

        That is so where scores do not matter, as in full passes, or not any more.
        """
        return not self.uses_scores

    def began(self, epoch: int) -> int:
        """Return the epoch with which the super-epoch of ``epoch`` begins."""
        return epoch

    def describe(self, scores: Scores | None, epoch: int) -> str:
        """Return in one line what is done in ``epoch``, and why, for the log; empty: nothing."""
        return ""


def as_sampler(candidate: Any) -> Sampler:
    """Return ``candidate`` as a full sampler, with defaults for the optional members it lacks.

    Raises :class:`~stoker.errors.ConfigError`, naming what is missing, when it lacks a required
    one.
    """
    if isinstance(candidate, Sampler):
        return candidate
    required = ("uses_scores", "longest", "length_at", "plan")
    check_members(candidate, "sampler", required, "stoker.sampler.Sampler")
    return _Completed(candidate)


@dataclass(frozen=True)
class _Completed(Sampler):
    """An object with the required members, completed by the defaults of :class:`Sampler`."""

    own: Any

    @property
    def uses_scores(self) -> bool:
        return bool(self.own.uses_scores)

    @property
    def longest(self) -> int:
        return int(self.own.longest)

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        return int(self.own.length_at(epoch, scores))

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        plan: Plan = self.own.plan(scores, epoch)
        return plan

    @property
    def apart(self) -> int | None:
        apart: int | None = getattr(self.own, "apart", None)
        return apart

    @property
    def reads_blocks(self) -> bool:
        return bool(getattr(self.own, "reads_blocks", False))

    @property
    def without_accuracy(self) -> str:
        return str(getattr(self.own, "without_accuracy", ""))

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        getattr(self.own, "begin_epoch", super().begin_epoch)(scores, epoch)

    def foresees(self, scores: Scores | None, epoch: int) -> bool:
        foresees = getattr(self.own, "foresees", super().foresees)
        return not self.uses_scores or bool(foresees(scores, epoch))

    def began(self, epoch: int) -> int:
        return int(getattr(self.own, "began", super().began)(epoch))

    def describe(self, scores: Scores | None, epoch: int) -> str:
        return str(getattr(self.own, "describe", super().describe)(scores, epoch))

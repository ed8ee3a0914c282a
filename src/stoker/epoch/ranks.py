"""The ranks of a job: which one this is, on which node, and the scores that they agree on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.observer import Observer
from stoker.errors import ConfigError, StateMismatch, warn_caller
from stoker.node.runtime_dir import chosen_node
from stoker.sampler.homes import Homes, local_order
from stoker.scores import MAX_EPOCHS, Scores
from stoker.store.claims import NOBODY

_COLUMNS = ("<f8", "<i8", "<i8", "<u4")
"""Of a message: values, last steps, observations, ids. The widest first: all are aligned."""

_ROW = sum(np.dtype(column).itemsize for column in _COLUMNS)


class Ranks(NamedTuple):
    """The place of a process among the data-parallel processes of the job."""

    rank: int
    world_size: int


class LazyRanks:
    """The ranks that the caller gave, or else what ``find`` returns at the first iteration.

    A framework may start its processes' communication after a loader is made. Raises ConfigError
    as :func:`checked_ranks` does.
    """

    def __init__(self, rank: int | None, world_size: int | None, find: Callable[[], Ranks]) -> None:
        self._fixed = checked_ranks(rank, world_size)
        self._find = find

    def now(self) -> Ranks:
        """Return the ranks as far as they can be known now."""
        return self._fixed or self._find()

    def fix(self) -> Ranks:
        """Return the ranks, which from now on stay as they are."""
        self._fixed = self.now()
        return self._fixed


def checked_ranks(rank: int | None, world_size: int | None) -> Ranks | None:
    """Return what the caller gave, or None when it is to be found out later.

    Raises :class:`~stoker.errors.ConfigError` unless both or neither are given and
    ``0 <= rank < world_size``.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ConfigError(f"rank={rank!r} and world_size={world_size!r}: give both or neither")
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: use 1 or more processes")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank={rank} is out of range: with world_size={world_size} use 0..{world_size - 1}"
        )
    return Ranks(rank, world_size)


def launched_ranks() -> Ranks:
    """Return what torchrun or srun set in the environment, else a single process.

    Raises :class:`~stoker.errors.ConfigError` for values that are no rank.
    """
    for names in _TORCHRUN, _SLURM:
        if not os.environ.keys() >= set(names):
            continue
        where = {name: os.environ[name] for name in names}
        try:
            given = checked_ranks(*(int(value) for value in where.values()))
        except ValueError as error:
            raise ConfigError(f"the environment says {where}, which is no rank: {error}") from error
        return given or Ranks(0, 1)
    return Ranks(0, 1)


_TORCHRUN = ("RANK", "WORLD_SIZE")
# Of the step that srun started: a batch script has SLURM_NTASKS too, and is one process.
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def is_first_on_node(ranks: Ranks) -> bool:
    """Whether this rank does what has to be done once per machine, by torchrun or srun."""
    if "LOCAL_RANK" in os.environ:
        return os.environ["LOCAL_RANK"] == "0"
    if os.environ.get("SLURM_STEP_NUM_TASKS") == str(ranks.world_size):
        return os.environ.get("SLURM_LOCALID", "0") == "0"
    return ranks.rank == 0


def ranks_on_node(ranks: Ranks) -> int:
    """Return how many ranks of the job this machine has, as far as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, numbered in the order of their first ranks."""

    of_rank: tuple[int, ...]
    """The node of each rank."""
    rank: int
    """This process's own."""

    @property
    def own(self) -> int:
        """The node of this process."""
        return self.of_rank[self.rank]

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return max(self.of_rank) + 1

    @property
    def is_first(self) -> bool:
        """Whether this rank does what has to be done once per node."""
        return self.of_rank.index(self.own) == self.rank

    @property
    def ranks_here(self) -> int:
        """How many ranks this node has."""
        return self.of_rank.count(self.own)

    def elsewhere(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the accesses ``i64[A]``, as ranks divide them, that other nodes take."""
        takers = np.array(self.of_rank)[np.arange(len(order)) % len(self.of_rank)]
        return np.asarray(order[takers != self.own])


def node_name() -> str:
    """Return what tells this machine from others: ``STOKER_NODE``, else host and boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text().strip() if boot.is_file() else ""
    return chosen_node() or f"{socket.gethostname()} {booted}"


class Locality:
    """The homes of samples on the nodes of a job, and who takes which access because of them.

    Pure but for a memory of the latest results; used by the training process only.
    """

    def __init__(self, nodes: Nodes, homes: Homes, batch: int) -> None:
        self.nodes = nodes
        self._homes = homes
        self._batch = batch
        self._ranks = np.array(nodes.of_rank)
        self._at = lru_cache(maxsize=2)(homes.at)

    def are_here(self, epoch: int) -> NDArray[np.bool_]:
        """Return bool[N], the samples to be kept on this node in the super-epoch from ``epoch``."""
        return np.asarray(self._at(epoch) == self.nodes.own)

    def order(self, ids: NDArray[np.uint32], epoch: int) -> NDArray[np.int64]:
        """Return i64[A], the accesses ``ids`` u32[A] in the order that ranks divide."""
        return local_order(self._at(epoch)[ids], self._ranks, self._batch)


Agree = Callable[[str, Ranks], str | None]
"""Returns the text that rank 0 gave, on all ranks; None where they cannot ask each other."""


def alone(text: str, ranks: Ranks) -> str | None:
    """Return the text of a single rank; None for several: an :data:`Agree` without a network."""
    return text if ranks.world_size == 1 else None


class Collective(Protocol):
    """The ranks of a job; each must call :meth:`gather` as often as the others."""

    rank: int
    world_size: int

    def gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the arrays ``[n]`` that the ranks gave, by rank; of one dtype, of any lengths.

        Raises :class:`~stoker.errors.RanksUnavailable` when one of them does not answer.
        """
        ...


class Alone:
    """A job of one rank."""

    rank = 0
    world_size = 1

    def gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the array by itself."""
        return [rows]


class Network(NamedTuple):
    """How the ranks of a framework speak with each other."""

    agree: Agree
    """Asks rank 0."""
    find_nodes: Callable[[Ranks], Nodes | None]
    """Returns the nodes of the job; None if they are not known, or there is one."""
    join: Callable[[int, int], Collective]
    """Returns what exchanges arrays between several ranks, given rank and world size."""


AgreedRescore = Callable[[NDArray[np.uint32]], None]
"""Has this rank's part of the ids ``u32[m]`` rescored."""


class Ended(NamedTuple):
    """An epoch that is over and not in the history yet."""

    epoch: int
    accuracy: float = float("nan")
    """As the training loop told it; NaN if it did not."""
    supply: float = float("nan")
    """What storage gave, as a share of what training took; see ``Scores.supplies``."""
    hit_ratio: float = float("nan")
    """Hits / accesses of this rank."""


class Agreement:
    """Brings the scores of all ranks together between two epochs.

    ``needed``: whether ranks have to agree, on scores or on when an epoch begins; otherwise
    ranks do not communicate. ``without_accuracy``: what becomes of training if no accuracy is told,
    of which is warned once an epoch is over; empty if that is no matter. ``is_resumable``: keep
    what was agreed on, for saved states; without it a job of one rank copies no scores. Used by the
    training process only, from one thread; with several ranks :meth:`reach` is a collective.
    """

    def __init__(
        self,
        observer: Observer,
        *,
        needed: bool,
        is_resumable: bool = True,
        without_accuracy: str = "",
    ) -> None:
        self.needed = needed
        self._without_accuracy = without_accuracy
        self._is_resumable = is_resumable
        self._ended: Ended | None = None
        self.agreed: Scores | None = None
        """What all ranks held when the latest epoch began, a snapshot; None if not needed."""
        self.is_uniform = False
        """Whether training does not play its part, and plans are to be uniform."""
        self._observer = observer

    @property
    def ended(self) -> Ended | None:
        """The epoch that is to be recorded when the next one begins."""
        return self._ended

    def end(self, ended: Ended) -> None:
        """Have an epoch that is over recorded when the next one begins."""
        self._ended = ended

    def tell(self, accuracy: float) -> None:
        """Have an accuracy recorded with the epoch that :meth:`end` was told of, if any."""
        if self._ended is not None:
            self._ended = self._ended._replace(accuracy=accuracy)

    def reach(
        self,
        epoch: int,
        ranks: Collective,
        rescore: AgreedRescore | None,
        settle: Callable[[Scores, int], None],
    ) -> Scores:
        """Return the scores that the plan of ``epoch`` is made from, the same on all ranks.

        ``settle`` has the last word on them, where plans follow scores.
        """
        scores = self._observer.scores
        if not self.needed:
            self._record(scores, [self._said()])
            return scores
        if ranks.world_size > 1:
            exchange(scores, self.agreed or scores_of(None, len(scores)), ranks)
        said = ranks.gather(self._said())
        self._record(scores, said)
        self.is_uniform = any(bool(row[3]) for row in said)
        scorer = self._observer.scorer
        scorer.begin_epoch(scores, epoch)
        if rescore is not None and len(volatile := scorer.volatile):
            before = scores.snapshot() if ranks.world_size > 1 else scores
            rescore(volatile)
            scores = self._observer.scores
            exchange(scores, before, ranks)
        settle(scores, epoch)
        if ranks.world_size == 1 and not self._is_resumable:
            return scores
        self.agreed = scores.snapshot()
        return self.agreed

    def check(self, identity: Callable[[int], str], epoch: int, ranks: Collective) -> None:
        """Raise :class:`~stoker.errors.ConfigError` unless all ranks made the same plan."""
        if not self.needed or ranks.world_size == 1:
            return
        made = ranks.gather(np.frombuffer(bytes.fromhex(identity(epoch)), np.uint8))
        plans = [part.tobytes().hex() for part in made]
        if len(set(plans)) > 1:
            raise ConfigError(
                f"the ranks made different plans of epoch {epoch}: {', '.join(plans)}. Give every "
                "rank the same data set, seed, recipe and state"
            )

    def restore(
        self, agreed: Mapping[str, Any] | None, ended: Sequence[Any] | None, is_uniform: bool
    ) -> None:
        """Put a saved state in the place of this one; ``agreed`` are arrays of Scores."""
        self.agreed = None if agreed is None else scores_of(agreed, len(agreed["values"]))
        self._ended = None if ended is None else Ended(int(ended[0]), *map(float, ended[1:]))
        self.is_uniform = bool(is_uniform)

    def _said(self) -> NDArray[np.float64]:
        """Return f64[6], what this rank has to say.

        Losses, how many, accuracy, whether it is starved, supply, hit ratio.
        """
        ended = self._ended or Ended(0)
        losses, observer = self._observer.take_loss(), self._observer
        measured = ended.supply, ended.hit_ratio
        return np.array([*losses, ended.accuracy, observer.is_starved, *measured])

    def _record(self, scores: Scores, said: list[NDArray[np.float64]]) -> None:
        """Write the epoch that is over into the history, as means over the ranks that know."""
        if self._ended is None or self._ended.epoch >= MAX_EPOCHS:
            return
        loss_sum, count = (sum(float(row[column]) for row in said) for column in (0, 1))
        known = [float(row[2]) for row in said if np.isfinite(row[2])]
        scores.record_epoch(
            self._ended.epoch,
            accuracy=sum(known) / len(known) if known else None,
            loss=loss_sum / count if count else None,
            # One rank's clock is enough, and all have to say the same.
            supply=float(said[0][4]),
            hit_ratio=float(said[0][5]),
        )
        self._ended = None
        if self._without_accuracy and not np.isfinite(scores.accuracies).any():
            warn_caller(
                "the recipe goes by validation accuracy, and none was told of the first epoch: "
                f"{self._without_accuracy}. Call loader.end_epoch(accuracy=...) after each epoch, "
                "with a share from 0 to 1"
            )
        self._without_accuracy = ""


def put_together(served: NDArray[np.uint32], ranks: Collective) -> NDArray[np.uint32]:
    """Return what the accesses of an epoch were served, by the states of all ranks together.

    ``served`` (``u32[n]``) is what this rank's state says. Every rank must call this. Raises
    :class:`~stoker.errors.StateMismatch` where states contradict each other, or none of them
    knows.
    """
    unknown = int(np.count_nonzero(served == NOBODY))
    said = np.stack(ranks.gather(np.array([len(served), unknown])))
    if (said[:, 0] != len(served)).any():
        raise StateMismatch(
            f"the states of the ranks are of different steps, after {said[:, 0].tolist()} samples: "
            "load those of one step"
        )
    if not said[:, 1].any():
        return served
    every = np.stack(ranks.gather(served))
    merged: NDArray[np.uint32] = every.min(axis=0)  # NOBODY is the largest
    if ((every != merged) & (every != NOBODY)).any():
        raise StateMismatch("the states of the ranks are of different runs: load those of one")
    left = int(np.count_nonzero(merged == NOBODY))
    if left:
        raise StateMismatch(
            f"of {len(merged)} samples handed out in the epoch the states do not say which {left} "
            "were, as other samples may have been served: of each node the state of a rank has to "
            "be loaded there. Give each rank the state that it saved, or restart the epoch"
        )
    return merged


def scores_of(arrays: Mapping[str, Any] | None, num_samples: int) -> Scores:
    """Return a snapshot of saved scores, or of those that nothing is known of yet."""
    scores = Scores(num_samples)
    if arrays is not None:
        scores.restore(**arrays)
    return scores.snapshot()


def exchange(scores: Scores, agreed: Scores, ranks: Collective) -> None:
    """Make ``scores`` the same on all ranks, given what all of them ``agreed`` on before.

    Only rows observed since then travel, 28 bytes each. Of a sample that several ranks observed,
    the score of the latest step counts, and of the highest rank where steps are equal; its
    observations add up. History, volatile samples and ``ready`` are left as they are: every rank
    derives them from the same rows. Every rank must call this. Raises
    :class:`~stoker.errors.RanksUnavailable` when a rank does not answer.
    """
    if ranks.world_size == 1:
        return
    ids = np.flatnonzero(scores.seen != agreed.seen)
    own = scores.values[ids], scores.last[ids], scores.seen[ids] - agreed.seen[ids], ids
    values, last, seen = agreed.values.copy(), agreed.last.copy(), agreed.seen.copy()
    latest = np.full(len(scores), np.iinfo(np.int64).min)
    for message in ranks.gather(_pack(own)):
        new_values, steps, times, rows = _unpack(message)
        seen[rows] += times  # a rank names no row twice
        counts = steps >= latest[rows]
        rows, steps = rows[counts], steps[counts]
        values[rows] = new_values[counts]
        last[rows] = latest[rows] = steps
    scores.restore(**{**scores.arrays(), "values": values, "last": last, "seen": seen})


def _pack(columns: tuple[NDArray[Any], ...]) -> NDArray[np.uint8]:
    """Return the columns ``[n]`` one behind the other, as bytes."""
    parts = [row.astype(kind).view(np.uint8) for row, kind in zip(columns, _COLUMNS, strict=True)]
    return np.concatenate(parts)


def _unpack(message: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Return the columns that :func:`_pack` was given."""
    count = len(message) // _ROW
    columns: list[NDArray[Any]] = []
    begin = 0
    for kind in _COLUMNS:
        end = begin + count * np.dtype(kind).itemsize
        columns.append(message[begin:end].view(kind))
        begin = end
    return columns

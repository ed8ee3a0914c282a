"""What a scorer is, what it is told about each batch, and how it scores in the background."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.knn import MakeIndex
from stoker.scores import Scores
from stoker.types import check_members

Signal = Literal["losses", "gradient_norms", "embeddings", "labels"]
_SIGNALS: tuple[Signal, ...] = get_args(Signal)

_REMEMBERED = 256
"""Batches that :meth:`Background.take_scored` returns at most; older ones are forgotten."""


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The edges that a graph found for the samples of one batch; an immutable value."""

    step: int
    """Of the batch."""
    ids: NDArray[np.uint32]
    """``u32[n]``, samples of the batch, each once."""
    degree: NDArray[np.int64]
    """``i64[n]``, number of neighbours of each, without itself."""
    of: Callable[[int], NDArray[np.uint32]]
    """Returns the neighbours ``u32[degree[i]]`` of sample ``i``, nearest first."""

    @classmethod
    def listed(
        cls,
        step: int,
        ids: NDArray[np.uint32],
        degree: NDArray[np.int64],
        neighbours: NDArray[np.uint32],
    ) -> Neighbours:
        """Return those whose ``neighbours``, ``u32[degree.sum()]``, lie one after the other."""
        return cls(step, ids, degree, _Listed(np.append(0, np.cumsum(degree)), neighbours))

    @property
    def all(self) -> NDArray[np.uint32]:
        """``u32[degree.sum()]``, the neighbours of each sample in turn."""
        lists = [self.of(index) for index in range(len(self.ids))]
        return np.concatenate(lists) if lists else np.empty(0, np.uint32)


@dataclass(frozen=True, eq=False)
class _Listed:
    offsets: NDArray[np.int64]
    neighbours: NDArray[np.uint32]

    def __call__(self, index: int, /) -> NDArray[np.uint32]:
        return self.neighbours[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class Observation:
    """What one training step showed about the samples of its batch.

    Row i of every signal belongs to ``ids[i]``, the sample really served. A frozen value over
    arrays that no longer change, so it may go to another thread. Raises
    :class:`~stoker.errors.ConfigError` if a signal has not one row for each id.
    """

    ids: NDArray[np.uint32]
    """``u32[n]``; an id may come twice."""
    step: int
    """Batches observed before this one."""
    epoch: int
    losses: NDArray[np.float64] | None = None
    """``f64[n]``."""
    gradient_norms: NDArray[np.float64] | None = None
    """``f64[n]``, norms of the gradient of the loss by the logits."""
    embeddings: NDArray[np.float32] | None = None
    """``f32[n, d]``, outputs of the layer before the classifier."""
    labels: NDArray[np.int64] | None = None
    """``i64[n]``, classes."""

    def __post_init__(self) -> None:
        for name in _SIGNALS:
            rows = getattr(self, name)
            dimensions = 2 if name == "embeddings" else 1
            if rows is not None and (rows.ndim != dimensions or len(rows) != len(self.ids)):
                raise ConfigError(
                    f"{name} have shape {rows.shape} for {len(self.ids)} ids: give one "
                    f"{'vector' if dimensions == 2 else 'number'} for each"
                )

    def signal(self, name: Signal) -> NDArray[Any]:
        """Return a signal that the scorer needs; ConfigError if the training loop gave none."""
        rows: NDArray[Any] | None = getattr(self, name)
        if rows is None:
            source = "logits= and labels=" if name == "gradient_norms" else f"{name}="
            raise ConfigError(
                f"this scorer needs {name} and observe() got none: pass {source} to observe()"
            )
        return rows

    def finite(self, name: Signal) -> tuple[NDArray[np.uint32], NDArray[Any]]:
        """Return the ids whose signal is finite, and their rows of it.

        A sample whose loss, gradient or embedding is NaN or infinite thus keeps its score. Raises
        as :meth:`signal`.
        """
        rows = self.signal(name)
        finite = np.isfinite(rows)
        if finite.all():
            return self.ids, rows
        keep = finite if rows.ndim == 1 else finite.all(axis=1)
        return self.ids[keep], rows[keep]


_Job = tuple[Scores, Observation]


class Scored(NamedTuple):
    """A batch whose scores have been written."""

    ids: NDArray[np.uint32]
    """``u32[n]``, its samples."""
    neighbours: Neighbours | None
    """Its edges, if the scorer finds any."""


class Scorer(ABC):
    """Turns what training shows into scores; called in the training process, by one thread.

    A scorer has ``needs`` and ``update``; everything else has a default here. An object that has
    these two without deriving from this class is completed by :func:`as_scorer`.
    """

    @property
    @abstractmethod
    def needs(self) -> frozenset[Signal]:
        """The signals that ``update`` reads; no other ones are copied from the accelerator."""

    @abstractmethod
    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the scores of the batch's samples: ``scores.update(ids, values, step)``.

        Values are finite. Raises :class:`~stoker.errors.ConfigError` if a needed signal is None.
        """

    @property
    def scores_are_losses(self) -> bool:
        """Whether a sample's score is the loss of its last visit, and ``update`` just writes it."""
        return False

    # --- between epochs ---

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Prepare for ``epoch``; called on every rank, with equal scores, before the plan is made.

        It may set ``scores.ready`` to False, which asks for a full pass, and call
        ``scores.set_volatile``. A second call for the same epoch changes nothing.
        """

    @property
    def volatile(self) -> NDArray[np.uint32]:
        """``u32[m]``, ids to be scored again before the plan is made."""
        return np.empty(0, np.uint32)

    @property
    def rescores(self) -> bool:
        """Whether :attr:`volatile` ever names samples."""
        return type(self).volatile is not Scorer.volatile

    def cache_holds(self, samples: int) -> None:
        """Learn how many samples of mean size the caches of all nodes hold together.

        Called before the first epoch.
        """

    # --- while training ---

    @property
    def neighbours(self) -> Neighbours | None:
        """Edges of the batch scored last; None if the scorer finds none."""
        return None

    def use_accelerator(self, index: MakeIndex) -> None:
        """Search neighbours with ``index``, on the device of training, unless one was chosen."""

    @property
    def is_deferred(self) -> bool:
        """Whether ``update`` returns before scores are written: :meth:`take_scored` names them."""
        return type(self).take_scored is not Scorer.take_scored

    def take_scored(self) -> list[Scored]:
        """Return the batches scored since the last call, if :attr:`is_deferred`."""
        return []

    def drain(self) -> None:
        """Return when every observation given so far is in the scores.

        Called before scores are read at the end of an epoch. Raises what went wrong in a thread.
        """

    # --- life ---

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint needs to continue exactly; empty: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, NDArray[Any]]) -> None:
        """Continue from what :meth:`state_dict` returned."""

    def close(self) -> None:
        """End threads and free indexes; the scorer is not used afterwards."""


def as_scorer(candidate: Any) -> Scorer:
    """Return ``candidate`` as a full scorer, with defaults for the optional members it lacks.

    Raises :class:`~stoker.errors.ConfigError`, naming what is missing, when it has not even
    ``needs`` and ``update``.
    """
    if isinstance(candidate, Scorer):
        return candidate
    check_members(candidate, "scorer", ("needs", "update"), "stoker.importance.Scorer")
    return _Completed(candidate)


class Background(Scorer):
    """Hands batches to another scorer in a thread of its own.

    :meth:`update` returns at once, and waits only while ``depth`` batches wait for their scores.
    Scores are complete after :meth:`drain`. What goes wrong in the thread is raised by the next
    call of :meth:`update`, :meth:`drain` or :meth:`begin_epoch`; the batch it happened with keeps
    its scores, and later ones are scored. Worth it for scorers that spend their time in native
    code which releases the GIL.

    Used by one thread; in a forked child, not at all. Raises
    :class:`~stoker.errors.ConfigError` for a depth below 1.
    """

    def __init__(self, scorer: Scorer, depth: int = 4) -> None:
        if depth < 1:
            raise ConfigError(f"depth={depth} is out of range: let at least 1 batch wait")
        self.scorer = as_scorer(scorer)
        """The other scorer; what it only reads may be asked of it at any time."""
        self._jobs: queue.Queue[_Job | None] = queue.Queue(depth)
        self._failures: list[Exception] = []
        self._scored: deque[Scored] = deque(maxlen=_REMEMBERED)
        self._thread: threading.Thread | None = None

    @property
    def needs(self) -> frozenset[Signal]:
        """What the other scorer needs."""
        return self.scorer.needs

    def update(self, scores: Scores, observation: Observation) -> None:
        """Have the batch scored; raises what went wrong with an earlier one."""
        self._raise()
        if self._thread is None:
            self._start()
        self._jobs.put((scores, observation))

    def take_scored(self) -> list[Scored]:
        """Return the batches scored since the last call, in order; does not wait."""
        return [self._scored.popleft() for _ in range(len(self._scored))]

    def drain(self) -> None:
        """Return when all batches given so far are in the scores, or raise what went wrong."""
        self._jobs.join()
        self._raise()
        self.scorer.drain()

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Drain, then let the other scorer begin its epoch."""
        self.drain()
        self.scorer.begin_epoch(scores, epoch)

    @property
    def volatile(self) -> NDArray[np.uint32]:
        """``u32[m]``, those of the other scorer."""
        return self.scorer.volatile

    @property
    def rescores(self) -> bool:
        """Whether the other scorer does."""
        return self.scorer.rescores

    def cache_holds(self, samples: int) -> None:
        """Tell the other scorer."""
        self.scorer.cache_holds(samples)

    @property
    def neighbours(self) -> Neighbours | None:
        """Edges of the batch that the other scorer scored last; may be read at any time."""
        return self.scorer.neighbours

    def use_accelerator(self, index: MakeIndex) -> None:
        """Let the other scorer search with ``index``."""
        self.scorer.use_accelerator(index)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Drain, then return the other scorer's state; empty if it has none."""
        self.drain()
        return self.scorer.state_dict()

    def load_state_dict(self, state: dict[str, NDArray[Any]]) -> None:
        """Drain, then let the other scorer continue from ``state``."""
        self.drain()
        self.scorer.load_state_dict(state)

    def close(self) -> None:
        """Drop what is waiting, end the thread, and close the other scorer."""
        if self._thread is not None:
            self._end()
            self._thread = None
        self.scorer.close()

    def _raise(self) -> None:
        if self._failures:
            raise self._failures.pop(0)

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_work,
            args=(self.scorer, self._jobs, self._scored, self._failures),
            name="stoker-scoring",
            daemon=True,
        )
        self._thread.start()
        # Native code must not run on while the interpreter is taken down.
        self._end = weakref.finalize(self, _end, self._thread, self._jobs, os.getpid())


class _Completed(Scorer):
    """An object with the required members, completed by the defaults of :class:`Scorer`."""

    def __init__(self, own: Any) -> None:
        self.own = own

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset(self.own.needs)

    def update(self, scores: Scores, observation: Observation) -> None:
        self.own.update(scores, observation)

    @property
    def scores_are_losses(self) -> bool:
        return bool(getattr(self.own, "scores_are_losses", False))

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        getattr(self.own, "begin_epoch", super().begin_epoch)(scores, epoch)

    @property
    def volatile(self) -> NDArray[np.uint32]:
        return np.asarray(getattr(self.own, "volatile", super().volatile), np.uint32)

    @property
    def rescores(self) -> bool:
        return bool(getattr(self.own, "rescores", hasattr(self.own, "volatile")))

    def cache_holds(self, samples: int) -> None:
        getattr(self.own, "cache_holds", super().cache_holds)(samples)

    @property
    def neighbours(self) -> Neighbours | None:
        neighbours: Neighbours | None = getattr(self.own, "neighbours", None)
        return neighbours

    def use_accelerator(self, index: MakeIndex) -> None:
        getattr(self.own, "use_accelerator", super().use_accelerator)(index)

    @property
    def is_deferred(self) -> bool:
        return bool(getattr(self.own, "is_deferred", hasattr(self.own, "take_scored")))

    def take_scored(self) -> list[Scored]:
        take = getattr(self.own, "take_scored", super().take_scored)
        return [Scored(*batch) for batch in take()]

    def drain(self) -> None:
        getattr(self.own, "drain", super().drain)()

    def state_dict(self) -> dict[str, NDArray[Any]]:
        return dict(getattr(self.own, "state_dict", super().state_dict)())

    def load_state_dict(self, state: dict[str, NDArray[Any]]) -> None:
        getattr(self.own, "load_state_dict", super().load_state_dict)(state)

    def close(self) -> None:
        getattr(self.own, "close", super().close)()


def _work(
    scorer: Scorer,
    jobs: queue.Queue[_Job | None],
    scored: deque[Scored],
    failures: list[Exception],
) -> None:
    """Score until None comes; holds no reference to the Background, so that it can go away."""
    while (job := jobs.get()) is not None:
        try:
            scorer.update(*job)
            scored.append(Scored(job[1].ids, scorer.neighbours))
        except Exception as error:
            failures.append(error)
        finally:
            jobs.task_done()
    jobs.task_done()


def _end(thread: threading.Thread, jobs: queue.Queue[_Job | None], pid: int) -> None:
    if os.getpid() != pid:  # a forked child has no such thread
        return
    while not jobs.empty():
        try:
            jobs.get_nowait()
        except queue.Empty:
            break
        jobs.task_done()
    jobs.put(None)
    thread.join()
